"""Traces: the values of one episode, as JSON lines that any program can write.

    {"parity": 1, "source": "my loop"}
    {"decision": 0, "boundary": "instruction", "value": "put the bowl on the stove"}
    {"decision": 0, "boundary": "camera", "key": "image",
     "value": {"dtype": "uint8", "shape": [256, 256, 3], "base64": "..."}}          (one line)
    {"decision": 0, "boundary": "tokens", "value": [31872, 31744]}

Numbers and lists stand as they are; arrays also as base64 of their bytes in C order, little-endian.
A boundary is a value that passes between two stages of a control loop. A value depends only on those
before it, so the first boundary at which two loops differ names the stage to look at. Boundaries may
be left out: only those that both traces hold are compared.
"""

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.util.arrays import view_as_array
from vla_rl.util.foreign_data import require_text


class Boundary(msgspec.Struct, frozen=True):
    """One kind of value that two loops can be compared by."""

    name: str
    """Name in a trace."""

    meaning: str
    """Contents, with type, shape and unit."""

    tolerance: float
    """Largest difference of two numbers that counts as equal; 0 for bytes and ids."""

    suspects: str
    """Usual reasons for a difference that first appears here."""


BOUNDARIES: Final = (
    Boundary(
        "instruction",
        "the task in words, str",
        0.0,
        "the suite, the task number, or the BDDL file's text instead of the file name's",
    ),
    Boundary(
        "camera",
        "an image as the simulator draws it, uint8 [H, W, 3], RGB, OpenGL's rows (bottom first)",
        0.0,
        "the initial state, the fixtures' scene seed, settle steps, assets, renderer, image size",
    ),
    Boundary(
        "orientation",
        "the image as the policy's preprocessing gets it, uint8 [H, W, 3]",
        0.0,
        "a rotation or mirroring that one loop lacks; OpenVLA's data are turned by 180 degrees",
    ),
    Boundary(
        "jpeg",
        "the image after encoding and decoding, uint8 [H, W, 3]",
        0.0,
        "another JPEG decoder, quality or chroma subsampling",
    ),
    Boundary(
        "resize",
        "the image in the network's size, uint8 [S, S, 3]",
        0.0,
        "another kernel (lanczos3, bicubic), antialiasing, or rounding",
    ),
    Boundary(
        "crop",
        "the image after the central crop, uint8 [S, S, 3]",
        0.0,
        "a crop that one loop lacks, or its area (0.9) taken as a side",
    ),
    Boundary(
        "state",
        "the robot's state as observed: position (m), axis times angle (rad), finger joints (m)",
        1e-6,
        "the sign of a quaternion, the order of its numbers, another frame of reference",
    ),
    Boundary(
        "proprioception",
        "the state as the network gets it, [-1, 1]",
        1e-6,
        "other statistics, or percentiles taken for minimum and maximum",
    ),
    Boundary(
        "prompt_ids",
        "token ids of the prompt, int64 [P], without padding",
        0.0,
        "another prompt, capital letters, a missing BOS or the space at the end",
    ),
    Boundary(
        "tokens",
        "the chosen tokens, int64 [T], or numbers, float32 [T]",
        1e-4,
        "weights, attention mask (OpenVLA-OFT's is bidirectional), dtype, or sampling",
    ),
    Boundary(
        "unit_action",
        "the chunk's numbers in [-1, 1], [H, D]",
        1e-4,
        "another number of bins, or bin edges taken for centres",
    ),
    Boundary(
        "action",
        "the chunk in the units of the training data, [H, D], before the gripper is converted",
        1e-4,
        "other statistics: the suite's key, percentiles or minimum and maximum, the mask",
    ),
    Boundary(
        "executed_action",
        "the actions that the environment got, [N, D], N <= H",
        1e-4,
        "the gripper's sign or threshold, clipping, a chunk cut short",
    ),
    Boundary(
        "success",
        "whether the task was solved, bool, once at the end",
        0.0,
        "the step limit, or a goal that is checked at another time",
    ),
)
"""All boundaries, in the order in which an episode produces their values."""


VERSION: Final = 1
_NAMES: Final = tuple(boundary.name for boundary in BOUNDARIES)
_DTYPES: Final = ("uint8", "int32", "int64", "float32", "float64", "bool")

Value: TypeAlias = np.ndarray | str | bool


class TraceEntry(msgspec.Struct, frozen=True):
    """One value of an episode.

    Example:
        TraceEntry(decision=0, boundary="tokens", value=np.array([31872, 31744, 31850]))
    """

    decision: int
    """Number of the decision that it belongs to, from 0."""

    boundary: str
    """Name of a boundary."""

    value: Value
    """An array, a text, or True or False."""

    key: str = ""
    """Name of the camera, if a decision has several values of this boundary."""


class Trace(msgspec.Struct, frozen=True):
    """The values of one episode, in the order of their making."""

    source: str
    """Description of the loop that made them."""

    entries: tuple[TraceEntry, ...]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace to a new or existing file. Raises: OSError."""
    lines: list[dict[str, Any]] = [{"parity": VERSION, "source": trace.source}]
    for entry in trace.entries:
        line = {
            "decision": entry.decision,
            "boundary": entry.boundary,
            "value": _encode_value(entry),
        }
        lines.append({**line, "key": entry.key} if entry.key else line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises: DataError naming the line and what is wrong there; OSError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text, expected a trace in JSON lines") from error
    head, *lines = text.splitlines() or [""]
    first = _parse_object(head, f"{path}:1")
    if first.get("parity") != VERSION:
        raise DataError(
            f'{path}:1 is not the head of a trace; expected {{"parity": {VERSION}, "source": ...}}'
        )
    entries = tuple(_parse_entries(path, lines))
    if not entries:
        raise DataError(f"{path} holds no values; expected a line for each value of the episode")
    source = require_text(first.get("source", path.name), f"source of {path}:1")
    return Trace(source=source, entries=entries)


def _parse_entries(path: Path, lines: Iterable[str]) -> Iterable[TraceEntry]:
    newest = 0
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        fields = _parse_object(line, location)
        unknown = set(fields) - {"decision", "boundary", "key", "value"}
        # a misspelt field would otherwise be a value that is never compared, and so always equal
        if unknown or "value" not in fields:
            raise DataError(
                f"{location} has the fields {sorted(fields)}, expected decision, boundary, value, and "
                "key if there are several cameras"
            )
        decision, boundary = fields.get("decision"), fields.get("boundary")
        if type(decision) is not int or decision < newest:
            raise DataError(
                f"{location}: decision is {decision!r}, expected a whole number of at least {newest}"
            )
        if boundary not in _NAMES:
            raise DataError(
                f"{location}: boundary is {boundary!r}, expected one of {', '.join(_NAMES)}"
            )
        newest = decision
        value = _parse_value(fields["value"], location)
        key = require_text(fields.get("key", ""), f"key of {location}")
        yield TraceEntry(decision, boundary, value, key)


def _parse_object(line: str, location: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{location} is a {type(found).__name__}, expected a JSON object")
    return found


def _encode_value(entry: TraceEntry) -> Any:
    if not isinstance(entry.value, np.ndarray):
        return entry.value
    array = np.ascontiguousarray(entry.value)
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"{entry.boundary} is {array.dtype}, expected one of {', '.join(_DTYPES)}")
    content = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": content}


def _parse_value(found: Any, location: str) -> Value:
    if isinstance(found, str | bool):
        return found
    try:
        if isinstance(found, dict):
            return _decode_array(found)
        array = np.asarray(found)
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise DataError(f"{location}: the value cannot be read: {error!r}") from error
    if array.dtype.name not in _DTYPES:
        raise DataError(f"{location}: the value is {array.dtype}, expected numbers, or a text")
    return array


def _decode_array(found: dict[str, Any]) -> np.ndarray:
    if found["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {found['dtype']!r}, expected one of {', '.join(_DTYPES)}")
    # without `validate`, Python skips what is no base64 and returns other numbers
    content = base64.b64decode(found["base64"], validate=True)
    return view_as_array(content, found["dtype"], found["shape"])
