"""Reading LIBERO's files of initial states without running anything that is in them.

A `.pruned_init` file was written by `torch.save`: a zip that holds one pickled NumPy array. A pickle is a program, so
it is not run here. Its instructions are only listed and compared with the one program that NumPy writes for a
contiguous little-endian float64 array; the shape and the bytes are then taken from their known places.
"""

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

_GLOBALS = ["numpy.core.multiarray _reconstruct", "numpy ndarray", "_codecs encode", "numpy dtype"]
_CALLS = {"REDUCE": 4, "BUILD": 2, "GLOBAL": 4}
"""How often such a program names a function, calls one and sets a state; any other count is another program."""

_REFUSED = frozenset(
    {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
)


def read_init_states(path: Path) -> np.ndarray:
    """float64 [N, 1 + nq + nv]: N states, each the time, the joint positions and the joint velocities of one start.

    Raises: `ValueError` if the file holds anything but one float64 matrix.
    """
    with zipfile.ZipFile(path) as archive:
        programs = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise ValueError(f"{path} holds {len(programs)} pickled objects, expected one.")
        instructions = [(code.name, argument) for code, argument, _ in pickletools.genops(archive.read(programs[0]))]
    shape, payload = _array_parts(instructions, path)
    return np.frombuffer(payload, "<f8").reshape(shape).copy()


def _array_parts(instructions: list[tuple[str, Any]], path: Path) -> tuple[tuple[int, int], bytes]:
    """The shape and the bytes of the array that these instructions would build."""
    names = [name for name, _ in instructions]
    strings = [argument for name, argument in instructions if name == "BINUNICODE"]
    is_array = (
        [argument for name, argument in instructions if name == "GLOBAL"] == _GLOBALS
        and not _REFUSED.intersection(names)
        and all(names.count(name) == count for name, count in _CALLS.items())
        and len(strings) == 5
        and strings[1:4] == ["latin1", "f8", "<"]
    )
    if not is_array:
        raise ValueError(
            f"{path} is not a file of initial states: expected one pickled float64 array and nothing else."
        )
    after_version = names.index("MARK") + 2  # MARK, the format version 1, then the two numbers of the shape
    rows, columns = (argument for _, argument in instructions[after_version : after_version + 2])
    payload = strings[4].encode("latin1")
    if not (isinstance(rows, int) and isinstance(columns, int) and rows * columns * 8 == len(payload)):
        raise ValueError(f"{path} holds {len(payload)} bytes for an array of {rows} x {columns} float64 values.")
    return (rows, columns), payload
