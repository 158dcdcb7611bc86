"""The episode store of a host: arrays of finished episodes, kept where they were made until they are used.

    trajectory ──► split_arrays ──► metadata-only trajectory (rewards, versions, infos) ──► scheduler: filters, counts
                       └──► arrays ──► EpisodeStore ── take_arrays, once the group is to be trained on ──► materialise
                                             └─ observed: to an image cache beside the learner's ranks

A group that is filtered never travels: its arrays are dropped where they are.
"""

import secrets
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.types import ArrayRef, EpisodeRef, Observation, Step, Trajectory

LARGE_BYTES: Final = 512
"""Arrays from this size on are kept; a smaller one costs less in place than its entry."""

EMBEDDING: Final = "embedding"
"""Place of an array that is not part of an episode: what an encoder has made of it."""

_IN_CHUNK: Final = ("actions", "tokens", "log_probs", "weight_versions")
_IN_STEP: Final = ("frames", "expert_actions")
_FINAL: Final = "final"
_EMPTY: Final = np.zeros((0,), np.float32)


class EpisodeStore:
    """Arrays by key, at most `max_bytes` of them. Owned by one event loop.

    Nothing is evicted: an episode that finds no room is handed over whole instead, so that an episode store
    that is too small costs traffic and never an episode.

    Args:
        host: name of the host, for the deposits.
        max_bytes: most bytes of arrays.
    """

    def __init__(self, host: str, max_bytes: int) -> None:
        self._host, self._max_bytes = host, max_bytes
        self._kept: dict[int, tuple[Trajectory, int, dict[str, np.ndarray]]] = {}
        self._num_bytes = 0
        # at random: the process that follows this one must not answer for its keys
        self._next_key = secrets.randbits(60)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that are kept."""
        return self._num_bytes

    def put_arrays(self, trajectory: Trajectory) -> Trajectory:
        """Keep the arrays of a trajectory; return what is left of it, or all if there is no room."""
        metadata, arrays = split_arrays(trajectory)
        num_bytes = sum(array.nbytes for array in arrays.values())
        if not arrays or self._num_bytes + num_bytes > self._max_bytes:
            return trajectory
        key, self._next_key = self._next_key, self._next_key + 1
        self._kept[key] = trajectory, num_bytes, arrays
        self._num_bytes += num_bytes
        episode_ref = EpisodeRef(host=self._host, key=key, num_bytes=num_bytes)
        return msgspec.structs.replace(metadata, episode_ref=episode_ref)

    def get_trajectory(self, key: int) -> Trajectory | None:
        """Return a trajectory whose arrays are kept, with all of them; None if they are not here."""
        return self._kept[key][0] if key in self._kept else None

    def take_arrays(self, key: int) -> dict[str, np.ndarray] | None:
        """Hand over the arrays of a trajectory, and keep them no longer; None if it has none."""
        if key not in self._kept:
            return None
        _, num_bytes, arrays = self._kept.pop(key)
        self._num_bytes -= num_bytes
        return arrays

    def get_observed(self, key: int) -> dict[str, np.ndarray] | None:
        """Return the arrays of a trajectory's observations, and keep them; None if it has none."""
        if key not in self._kept:
            return None
        return {path: array for path, array in self._kept[key][2].items() if is_observed(path)}

    def keep_only(self, keys: Collection[int]) -> tuple[int, ...]:
        """Keep the arrays of these trajectories alone; return which of them are here."""
        for key in self._kept.keys() - set(keys):
            self.drop_episode(key)
        return tuple(self._kept)

    def drop_episode(self, key: int) -> None:
        """Drop the arrays of a trajectory that nothing will use; an unknown key is ignored."""
        self.take_arrays(key)


def is_observed(path: str) -> bool:
    """Return whether the array at this place is part of an observation."""
    return path.startswith(f"{_FINAL}/") or path.partition("/")[2].startswith("observation/")


def without_observed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that a learner needs of an episode whose observations have another way.

    Frames between two decisions are for encoders alone, so they are left out.
    """
    return {
        path: array
        for path, array in arrays.items()
        if not is_observed(path) and not path.endswith("/frames")
    }


def lacks_observed(metadata: Trajectory) -> bool:
    """Return whether observations of a trajectory have arrays in an episode store."""
    seen = [*(step.observation for step in metadata.steps), metadata.final_observation]
    return any(value is None for one in seen for value in one.values())


def observed_bytes(trajectory: Trajectory) -> int:
    """Return the bytes of the large arrays of a trajectory's observations that are in it."""
    seen = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    arrays = (each for one in seen for each in one.values() if isinstance(each, np.ndarray))
    return sum(array.nbytes for array in arrays if array.nbytes >= LARGE_BYTES)


def split_arrays(trajectory: Trajectory) -> tuple[Trajectory, dict[str, np.ndarray]]:
    """Split a trajectory into one without large arrays, and those arrays by place."""
    arrays: dict[str, np.ndarray] = {}
    steps = []
    for number, step in enumerate(trajectory.steps):
        chunk: dict[str, Any] = {}
        for name in _IN_CHUNK:
            array = getattr(step.chunk, name)
            if array is not None:
                arrays[f"{number}/chunk/{name}"] = array
                chunk[name] = None if name == "weight_versions" else _EMPTY
        if step.chunk.drawn is not None:
            chunk["drawn"] = _split_drawn(step.chunk.drawn, f"{number}/chunk/drawn", arrays)
        changed: dict[str, Any] = {"chunk": msgspec.structs.replace(step.chunk, **chunk)}
        for name in _IN_STEP:
            array = getattr(step, name)
            if array is not None:
                arrays[f"{number}/{name}"], changed[name] = array, None
        changed["observation"] = _without_arrays(step.observation, f"{number}/observation", arrays)
        steps.append(msgspec.structs.replace(step, **changed))
    final = _without_arrays(trajectory.final_observation, _FINAL, arrays)
    metadata = msgspec.structs.replace(trajectory, steps=tuple(steps), final_observation=final)
    return metadata, arrays


def materialise(metadata: Trajectory, arrays: Mapping[str, np.ndarray | ArrayRef]) -> Trajectory:
    """Put the arrays back into a trajectory that was split, or what stands for them."""
    observations: dict[str, dict[str, Any]] = {}
    for path, array in arrays.items():
        owner, _, name = path.rpartition("/")
        observations.setdefault(owner, {})[name] = array
    steps = tuple(
        _materialise_step(step, str(k), observations) for k, step in enumerate(metadata.steps)
    )
    # in the order of the light one, whose places were kept
    final = {**metadata.final_observation, **observations.get(_FINAL, {})}
    return msgspec.structs.replace(
        metadata,
        steps=steps,
        final_observation=final,
        episode_ref=None,
        embedding=arrays.get(EMBEDDING, metadata.embedding),
    )


def _materialise_step(step: Step, number: str, arrays: dict[str, dict[str, Any]]) -> Step:
    chunk: dict[str, Any] = arrays.get(f"{number}/chunk", {})
    if step.chunk.drawn is not None:
        chunk = {**chunk, "drawn": step.chunk.drawn | arrays.get(f"{number}/chunk/drawn", {})}
    return msgspec.structs.replace(
        step,
        observation={**step.observation, **arrays.get(f"{number}/observation", {})},
        chunk=msgspec.structs.replace(step.chunk, **chunk),
        **arrays.get(number, {}),
    )


def _split_drawn(
    drawn: Mapping[str, np.ndarray], owner: str, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a chunk's drawn arrays without the large ones, which go to `arrays`."""
    moved = {name for name, each in drawn.items() if each.nbytes >= LARGE_BYTES and "/" not in name}
    arrays |= {f"{owner}/{name}": drawn[name] for name in moved}
    # An empty array keeps the name's place: in what order names come is part of a trajectory.
    return {name: _EMPTY if name in moved else array for name, array in drawn.items()}


def _without_arrays(seen: Observation, owner: str, arrays: dict[str, np.ndarray]) -> Observation:
    """Return an observation with None for each large array, which goes to `arrays`."""
    metadata = dict(seen)
    for name, value in seen.items():
        # "/" divides places; an array below such a key travels in place
        is_heavy = isinstance(value, np.ndarray) and value.nbytes >= LARGE_BYTES
        if is_heavy and "/" not in name:
            arrays[f"{owner}/{name}"], metadata[name] = value, None
    return metadata
