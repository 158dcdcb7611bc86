"""Names that clients give to entries of observations, mapped to the policy's.

    client's entries ─► map ─► checked against what the policy reads ─► Observation
    observation/image     = image
    observation/state     = state
    prompt                = instruction

Clients of openpi's protocol name entries as their robot's data set does. A map says which entry is
which of the policy's; several entries for one vector are joined in order. Entries with the policy's
own names need no map.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.types import Observation
from vla_rl.types.observation import DELAY_KEY, PLANNED_KEY
from vla_rl.util.values import excerpt

PUBLISHED_MAPS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "libero": (
        ("observation/image", "image"),
        ("observation/wrist_image", "wrist_image"),
        ("observation/state", "state"),
        ("prompt", "instruction"),
    ),
    "droid": (
        ("observation/exterior_image_1_left", "image"),
        ("observation/exterior_image_2_left", "image_2"),
        ("observation/wrist_image_left", "wrist_image"),
        ("observation/joint_position", "state"),
        ("observation/gripper_position", "state"),
        ("prompt", "instruction"),
    ),
    "aloha": (
        ("images/cam_high", "image"),
        ("images/cam_low", "low_image"),
        ("images/cam_left_wrist", "left_wrist_image"),
        ("images/cam_right_wrist", "right_wrist_image"),
        ("state", "state"),
        ("prompt", "instruction"),
    ),
}
"""Entries that openpi's examples for these robots send, and our names for them."""

Kind: TypeAlias = Literal["image", "vector", "text", "rows", "number"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the observations that a policy reads.

    Example:
        Entry("vector", size=8)
    """

    kind: Kind
    size: int = 0
    """Numbers of a vector, or of each row; 0: any."""

    is_optional: bool = False
    """Whether an observation may lack it."""

    def __str__(self) -> str:
        words = {
            "image": "image uint8 [height, width, 3]",
            "vector": f"float32 [{self.size}]",
            "text": "text",
            "rows": f"float32 [rows, {self.size}]",
            "number": "a whole number",
        }
        return words[self.kind] + (" (optional)" if self.is_optional else "")


class BadObservation(ValueError):
    """An observation whose entries are not those that the policy reads."""


def find_entries(example: Observation) -> dict[str, Entry]:
    """Return the entries of an observation that the policy can read, by name."""
    found: dict[str, Entry] = {}
    for name, value in example.items():
        if isinstance(value, str):
            found[name] = Entry("text")
        elif isinstance(value, np.ndarray) and value.ndim == 3:
            found[name] = Entry("image")
        elif isinstance(value, np.ndarray) and value.ndim == 1:
            found[name] = Entry("vector", len(value))
    return found


def list_plan_entries(action_size: int) -> dict[str, Entry]:
    """Return the entries of a robot's plan, for policies that continue it (`vla_rl.types.with_plan`)."""
    return {
        PLANNED_KEY: Entry("rows", action_size, is_optional=True),
        DELAY_KEY: Entry("number", is_optional=True),
    }


def read_map(options: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Read `--map`: names of published maps, or pairs such as `observation/image=image`.

    Raises: ConfigError for a name or pair that is neither, or a source that is named twice.
    """
    pairs: list[tuple[str, str]] = []
    for option in options:
        source, equals, target = option.partition("=")
        if equals and source and target:
            pairs.append((source, target))
        elif option in PUBLISHED_MAPS:
            pairs += PUBLISHED_MAPS[option]
        else:
            raise ConfigError(
                f"map is {option!r}, expected one of {', '.join(PUBLISHED_MAPS)}, or a pair such as "
                "observation/image=image (the client's name, then the policy's)"
            )
    targets: dict[str, str] = {}
    for source, target in pairs:
        if targets.setdefault(source, target) != target:
            raise ConfigError(
                f"map has two names for {source!r}: {targets[source]!r} and {target!r}; expected one"
            )
    # each once: two published maps share "prompt"
    return tuple(targets.items())


class ObservationReader:
    """Turns a client's entries into the observation that a policy reads.

    Args:
        entries: what the policy reads, by name.
        pairs: the client's name and the policy's name of each mapped entry.
    """

    def __init__(self, entries: Mapping[str, Entry], pairs: Sequence[tuple[str, str]]) -> None:
        # a policy's own name wins: ALOHA's "state" is also most policies' own
        self._targets = dict(pairs) | {name: name for name in entries}
        self._entries = dict(entries)

    def describe(self) -> dict[str, str]:
        """Return what a client may send: for each of the policy's entries its kind and its names."""
        return {
            name: f"{entry}, as {' or '.join(self._sources(name))}"
            for name, entry in self._entries.items()
        }

    def list_unused(self) -> list[tuple[str, str]]:
        """Return the pairs of the map whose entry the policy does not read."""
        return [pair for pair in self._targets.items() if pair[1] not in self._entries]

    def read(self, message: Mapping[str, Any]) -> Observation:
        """Return the observation.

        Args:
            message: the client's entries, nested maps joined by "/" (`flatten_names`).

        Raises: BadObservation naming every entry that is missing, unknown or of another kind.
        """
        unknown: list[str] = []
        unused: list[str] = []
        given: dict[str, list[tuple[str, Any]]] = {}
        # In the map's order: a client that sorts its names sends the gripper before the joints.
        order = {source: number for number, source in enumerate(self._targets)}
        for source, value in sorted(
            message.items(), key=lambda item: order.get(item[0], len(order))
        ):
            target = self._targets.get(source)
            if target is None:
                unknown.append(excerpt(source))
            elif target in self._entries:
                given.setdefault(target, []).append((source, value))
            else:  # a camera of the robot that this policy does not look at, or a slip in the map
                unused.append(
                    f"{source!r} is {target!r} in the map, which the policy does not read"
                )
        problems: list[str] = []
        if unknown:
            problems.append(
                f"{' and '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown, expected "
                f"{', '.join(self._targets)}; the server's --map gives an entry of a client another name"
            )
        observation: Observation = {}
        for name, entry in self._entries.items():
            if name not in given:
                if entry.is_optional:
                    continue
                names = " or ".join(map(repr, self._sources(name)))
                problems.append(f"{names} is missing, expected {entry}")
                continue
            try:
                observation[name] = _read_entry(entry, given[name])
            except BadObservation as error:
                problems.append(str(error))
        if problems:
            raise BadObservation("; ".join([*problems, *unused]))
        return observation

    def _sources(self, name: str) -> list[str]:
        """Return the client's names of an entry, the mapped ones first."""
        mapped = [source for source, target in self._targets.items() if target == name]
        return sorted(mapped, key=lambda source: source == name)


def _read_entry(entry: Entry, given: Sequence[tuple[str, Any]]) -> Any:
    if entry.kind == "vector":
        return _read_vector(entry, given)
    if len(given) > 1:
        raise BadObservation(
            f"{' and '.join(repr(source) for source, _ in given)} are the same entry, expected one"
        )
    source, value = given[0]
    if entry.kind == "rows":
        return _read_rows(entry, source, value)
    if entry.kind == "number":
        return _read_number(entry, source, value)
    return _read_text(source, value) if entry.kind == "text" else _read_image(source, value)


def _read_rows(entry: Entry, source: str, value: Any) -> np.ndarray:
    is_rows = isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "fiu"
    if not is_rows or value.shape[1] != entry.size or not np.isfinite(value).all():
        raise BadObservation(f"{source!r} is {_describe(value)}, expected finite {entry}")
    rows: np.ndarray = value.astype(np.float32)
    return rows


def _read_number(entry: Entry, source: str, value: Any) -> int:
    number = (
        value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    )
    if isinstance(number, bool) or not isinstance(number, int | float) or number % 1 != 0:
        raise BadObservation(f"{source!r} is {_describe(value)}, expected {entry}")
    return int(number)


def _read_text(source: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadObservation(f"{source!r} is {_describe(value)}, expected text")
    return value


def _read_vector(entry: Entry, given: Sequence[tuple[str, Any]]) -> np.ndarray:
    sources = " and ".join(repr(source) for source, _ in given)
    parts = []
    for source, value in given:
        # a gripper's position comes as one number from some robots
        part = np.atleast_1d(value) if isinstance(value, float | int | np.generic) else value
        if not isinstance(part, np.ndarray) or part.ndim != 1 or part.dtype.kind not in "fiu":
            raise BadObservation(f"{source!r} is {_describe(value)}, expected {entry}")
        parts.append(part.astype(np.float32))
    vector: np.ndarray = np.concatenate(parts)
    if entry.size and len(vector) != entry.size:
        raise BadObservation(f"{sources} has {len(vector)} numbers, expected {entry.size}")
    if not np.isfinite(vector).all():
        raise BadObservation(f"{sources} holds NaN or infinity, expected finite numbers")
    return vector


def _read_image(source: str, value: Any) -> np.ndarray:
    """Return an image uint8 [height, width, 3].

    As openpi's own policies do, channels may come first, and numbers in [0, 1] are colours too.
    """
    expected = Entry("image")
    if not isinstance(value, np.ndarray) or value.ndim != 3 or 0 in value.shape:
        raise BadObservation(f"{source!r} is {_describe(value)}, expected {expected}")
    image = value
    if image.shape[-1] != 3 and image.shape[0] == 3:
        image = image.transpose(1, 2, 0)
    if image.shape[-1] != 3:
        raise BadObservation(f"{source!r} is {_describe(value)}, expected {expected}")
    if image.dtype.kind == "f":
        if not (image.min() >= 0.0 and image.max() <= 1.0):  # false for NaN too
            raise BadObservation(
                f"{source!r} holds floats outside [0, 1], expected uint8, or floats in [0, 1]"
            )
        image = np.rint(image * 255.0)
    elif image.dtype != np.uint8:
        raise BadObservation(f"{source!r} is {_describe(value)}, expected {expected}")
    return np.ascontiguousarray(image, np.uint8)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} {list(value.shape)}"
    return type(value).__name__
