"""Load MuJoCo and robosuite so that they print nothing and write only below the temporary folder.

By default they open one log file for all users of the machine, write compiled code beside the
installed packages, and accept any MuJoCo. `load_simulator` prevents this, and every other module of
this package uses it. `libero_code` loads LIBERO itself.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import stat
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vla_rl.errors import EnvError
from vla_rl.installing import pip_command

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
    cache = cache_folder()
    lasting = {
        "NUMBA_CACHE_DIR": cache / "numba",
        "MESA_SHADER_CACHE_DIR": cache / "mesa",
        "MPLCONFIGDIR": cache / "matplotlib",
    }
    for name, folder in lasting.items():
        os.environ.setdefault(name, str(folder))
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
    with importing(), _quiet_robosuite():
        mujoco = importlib.import_module("mujoco")
        refuse_wrong_mujoco(mujoco.__version__)
        _keep_no_assets(mujoco)
        mujoco.set_mju_user_warning(_tell)  # else MuJoCo writes a log file into the current folder
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


@contextlib.contextmanager
def importing(**variables: str) -> Iterator[None]:
    """Import third-party modules without OpenGL, with one thread and these environment variables,
    and without warnings.
    """
    one_thread = {
        f"{library}_NUM_THREADS": os.environ.get(f"{library}_NUM_THREADS", "1")
        for library in ("OMP", "OPENBLAS")
    }
    with (
        warnings.catch_warnings(),
        _environment(MUJOCO_GL="disable", MUJOCO_EGL_DEVICE_ID=None, **one_thread, **variables),
    ):
        # of third-party modules; none of ours is imported here
        for kind in (DeprecationWarning, SyntaxWarning):
            warnings.simplefilter("ignore", kind)
        yield


def _tell(warning: str) -> None:
    print(f"MuJoCo: {warning}", file=sys.stderr, flush=True)


def _keep_no_assets(mujoco: Any) -> None:
    """Make MuJoCo free the meshes and textures of a built model: by default it caches up to 500 MB
    for the next one.
    """
    (path,) = Path(mujoco.__file__).parent.glob("libmujoco.*")
    library = ctypes.CDLL(str(path))
    library.mj_globalCache.restype = ctypes.c_void_p
    library.mj_setCacheSize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mj_setCacheSize(library.mj_globalCache(), 0)


def refuse_wrong_mujoco(version: str) -> None:
    """Raise `EnvError` unless this version of MuJoCo has the physics and pictures of LIBERO's
    published results.
    """
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
    if _OLDEST_MUJOCO <= numbers < _FIRST_WRONG_MUJOCO:
        return
    raise EnvError(
        f"mujoco is {version}, expected >=3.3.0,<3.3.3: from 3.3.3 on LIBERO's floors are drawn "
        "darker, and from 3.4.0 on "
        "box contacts differ, so that the bowl of libero_spatial task 5 no longer rests on the "
        "ramekin and success "
        'rates are not comparable. Run `pip install "mujoco>=3.3.0,<3.3.3"`.'
    )


def cache_folder() -> Path:
    """Return a folder below the temporary one, of this user only, for compiled code; it is kept, to
    start later processes fast.
    """
    folder = Path(tempfile.gettempdir()) / f"vla_rl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EnvError(
            f"{folder} belongs to another user or others may write to it; remove it or set TMPDIR."
        )
    return folder


@contextlib.contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set (or with None: unset) environment variables, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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
