"""Load MuJoCo and robosuite so that they print nothing and write only below the temporary folder.

By default robosuite opens one log file for all users of the machine, writes compiled code beside
the installed packages, and accepts any MuJoCo. `load_simulator` prevents this, and every other
module of this package uses it. `libero_code` loads LIBERO itself.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vla_rl.envs.mujoco.loading import importing, keep_compiled_code, load_mujoco
from vla_rl.errors import EnvError
from vla_rl.util.installing import pip_command

_OLDEST_MUJOCO, _FIRST_WRONG_MUJOCO = (3, 3, 0), (3, 3, 3)


class Simulator(NamedTuple):
    """The loaded packages."""

    mujoco: Any

    randomization_error: type[Exception]
    """robosuite's error if it finds no free place for an object."""

    axisangle2quat: Any
    quat2mat: Any
    """robosuite's own functions, the second of which rounds to float32; goal orientations are
    computed with them."""


@functools.cache
def load_simulator() -> Simulator:
    """Import MuJoCo and robosuite, once in a process, without OpenGL, so that the process can still
    fork.

    Raises: `ImportError` if a package is missing, `EnvError` for a MuJoCo with other physics or
    pictures.
    """
    keep_compiled_code(NUMBA_CACHE_DIR="numba", MPLCONFIGDIR="matplotlib")
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
    mujoco = load_mujoco()
    refuse_wrong_mujoco(mujoco.__version__)
    with importing(), _quiet_robosuite():
        try:
            transforms = importlib.import_module("robosuite.utils.transform_utils")
            errors = importlib.import_module("robosuite.utils.errors")
        except ImportError as error:
            raise ImportError(
                f"robosuite cannot be imported ({error}); run `{pip_command('libero')}`."
            ) from error
    return Simulator(
        mujoco, errors.RandomizationError, transforms.axisangle2quat, transforms.quat2mat
    )


def refuse_wrong_mujoco(version: str) -> None:
    """Raise `EnvError` unless this version of MuJoCo has the physics and pictures of LIBERO's
    published results.
    """
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
    if _OLDEST_MUJOCO <= numbers < _FIRST_WRONG_MUJOCO:
        return
    raise EnvError(
        f"mujoco is {version}, expected >=3.3.0,<3.3.3: from 3.3.3 on LIBERO's floors are drawn "
        "darker, and from 3.4.0 on box contacts differ, so that the bowl of libero_spatial task 5 "
        "no longer rests on the ramekin and success "
        'rates are not comparable. Run `pip install "mujoco>=3.3.0,<3.3.3"`.'
    )


@contextlib.contextmanager
def _quiet_robosuite() -> Iterator[None]:
    """Import robosuite without its log file and its hint about private settings.

    robosuite reads its settings from a module during its import, so that module is prepared first.
    """
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations or "robosuite" in sys.modules:
        yield
        return
    root = Path(package.submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("robosuite.macros", root / "macros.py")
    if spec is None or spec.loader is None:
        yield
        return
    macros: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None
    macros.MUJOCO_GPU_RENDERING = False  # keep the MUJOCO_GL that was chosen
    sys.modules["robosuite.macros"] = macros
    has_private = (root / "macros_private.py").exists()
    if not has_private:
        sys.modules["robosuite.macros_private"] = types.ModuleType("robosuite.macros_private")
    try:
        yield
    finally:
        if not has_private:
            sys.modules.pop("robosuite.macros_private", None)
        if "robosuite" in sys.modules:
            sys.modules["robosuite"].macros = macros  # type: ignore[attr-defined]
