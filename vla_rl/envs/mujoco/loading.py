"""Load MuJoCo so that it prints nothing, writes only below the temporary folder and opens no
OpenGL.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_rl.errors import EnvError


@functools.cache
def load_mujoco() -> Any:
    """Import MuJoCo, once in a process, without OpenGL, so that the process can still fork.

    Raises: `ImportError` if it is not installed.
    """
    keep_compiled_code(MESA_SHADER_CACHE_DIR="mesa")
    with importing():
        mujoco = importlib.import_module("mujoco")
    _keep_no_assets(mujoco)
    mujoco.set_mju_user_warning(_tell)  # else MuJoCo writes a log file into the current folder
    return mujoco


def keep_compiled_code(**folders: str) -> None:
    """Point environment variables that are not set at folders below `cache_folder`."""
    for name, folder in folders.items():
        os.environ.setdefault(name, str(cache_folder() / folder))


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


def _tell(warning: str) -> None:
    print(f"MuJoCo: {warning}", file=sys.stderr, flush=True)


def _keep_no_assets(mujoco: Any) -> None:
    """Make MuJoCo free the meshes and textures of a built model: by default it caches up to 500 MB
    for the next one.
    """
    (path,) = Path(mujoco.__file__).parent.glob("libmujoco.*")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "mj_globalCache"):
        return  # MuJoCo 3.4 has other functions; whoever needs another version says so by its name
    library.mj_globalCache.restype = ctypes.c_void_p
    library.mj_setCacheSize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mj_setCacheSize(library.mj_globalCache(), 0)


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
