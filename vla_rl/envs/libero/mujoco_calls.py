"""Addresses of MuJoCo's C functions, which compiled code can call without Python in between.

The shared library that `import mujoco` has loaded is opened once more by its path, which gives the
same code, and the address of each function is looked up. Addresses are arguments of the compiled
code, not part of it, so that it can be kept on disk from one process to the next.
"""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


class MujocoFunctions(NamedTuple):
    """Addresses of C functions, in this process."""

    step1: int
    """`mj_step1(m, d)`: everything that depends on positions and velocities."""

    step2: int
    """`mj_step2(m, d)`: forces, constraint solver, integration."""

    forward_skip: int
    """`mj_forwardSkip(m, d, stage, skip_sensors)`."""

    jac_site: int
    """`mj_jacSite(m, d, jacp, jacr, site)`."""


def mujoco_functions(mujoco: Any) -> MujocoFunctions:
    """Return the functions of the loaded package `mujoco`."""
    (path,) = Path(mujoco.__file__).parent.glob("libmujoco.*")
    library = ctypes.CDLL(str(path))

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    return MujocoFunctions(
        address("mj_step1"), address("mj_step2"), address("mj_forwardSkip"), address("mj_jacSite")
    )


def _void_call(kinds: str) -> Any:
    """Return an intrinsic that calls the C function at an address.

    `kinds` has "p" for each pointer and "i" for each int.
    """
    signature = types.void(
        types.uintp, *(types.uintp if kind == "p" else types.int32 for kind in kinds)
    )

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(
            ir.VoidType(), [pointer if kind == "p" else whole for kind in kinds]
        )
        address, *values = arguments
        passed = [
            builder.inttoptr(value, pointer) if kind == "p" else value
            for kind, value in zip(kinds, values, strict=True)
        ]
        builder.call(builder.inttoptr(address, function.as_pointer()), passed)
        return _context.get_dummy_value()

    return signature, generate


def _call_step(_typing: Any, address: Any, model: Any, data: Any) -> Any:
    return _void_call("pp")


def _call_forward_skip(
    _typing: Any, address: Any, model: Any, data: Any, stage: Any, skip_sensors: Any
) -> Any:
    return _void_call("ppii")


def _call_jac_site(
    _typing: Any, address: Any, model: Any, data: Any, jacp: Any, jacr: Any, site: Any
) -> Any:
    return _void_call("ppppi")


call_step: Any = intrinsic(_call_step)
"""In compiled code: `call_step(address, model, data)` calls `void f(model, data)`."""

call_forward_skip: Any = intrinsic(_call_forward_skip)
"""`call_forward_skip(address, model, data, stage, skip_sensors)`, two pointers and two int32."""

call_jac_site: Any = intrinsic(_call_jac_site)
"""`call_jac_site(address, model, data, jacp, jacr, site)`, four pointers and an int32."""

compiled = numba.njit(cache=True, error_model="numpy")
"""Compiler of the control step: cached on disk, without fast-math, so that results equal
NumPy's."""
