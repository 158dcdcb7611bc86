"""Load MuJoCo quietly, with an OpenGL that draws off screen.

MuJoCo is imported so that it prints nothing, writes only below the temporary folder and opens no
OpenGL. The library for OpenGL is chosen later, once in a process. EGL draws on the GPU (or on the
CPU, through Mesa); OSMesa draws on the CPU. PyOpenGL binds a process to one of them at its first
import, so both are tried here through ctypes, without PyOpenGL. `MUJOCO_GL` (egl, osmesa) decides
if it is set; `MUJOCO_EGL_DEVICE_ID` selects the EGL device of this process. If it is not set, the
processes of a pool take the GPUs in turn.

A process that has chosen can still be forked, but the fork cannot draw: Mesa's threads do not exist
in it, and its first image would wait for them forever. So `require_own_opengl` raises an error
there.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vla_rl.env_workers.config import PROCESS_INDEX_VARIABLE
from vla_rl.errors import EnvError


@functools.cache
def load_mujoco() -> Any:
    """Import MuJoCo, once in a process, without OpenGL, so that the process can still fork.

    Raises: `ImportError` if it is not installed.
    """
    set_cache_folders(MESA_SHADER_CACHE_DIR="mesa")
    with quiet_imports():
        mujoco = importlib.import_module("mujoco")
    _disable_asset_cache(mujoco)
    # By default MuJoCo writes a log file into the current folder.
    mujoco.set_mju_user_warning(_print_warning)
    return mujoco


def set_cache_folders(**folders: str) -> None:
    """Point environment variables that are not set at folders below `cache_folder`."""
    for name, folder in folders.items():
        os.environ.setdefault(name, str(cache_folder() / folder))


@contextlib.contextmanager
def quiet_imports(**variables: str) -> Iterator[None]:
    """Import third-party modules without OpenGL, with one thread and these environment variables,
    and without warnings.
    """
    # Matrices are 7 x 7: threads of BLAS would only take turns on the cores that simulators share.
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
    # Compiled code of this folder is executed, so that no other user may be able to write it.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EnvError(
            f"{folder} belongs to another user or others may write to it; remove it or set TMPDIR."
        )
    return folder


def _print_warning(warning: str) -> None:
    print(f"MuJoCo: {warning}", file=sys.stderr, flush=True)


def _disable_asset_cache(mujoco: Any) -> None:
    """Make MuJoCo free the meshes and textures of a built model: by default it caches up to 500 MB
    for the next one.
    """
    (path,) = Path(mujoco.__file__).parent.glob("libmujoco.*")
    library = ctypes.CDLL(str(path))
    # MuJoCo 3.4 has other functions, and its version is refused later, by its name.
    if not hasattr(library, "mj_globalCache"):
        return
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


GRAPHICS_REMEDY = (
    "Install one of them with `apt-get install libegl1 libgl1` (EGL; with an NVIDIA GPU the driver "
    "brings it, and a container needs the `graphics` capability) or `apt-get install libosmesa6` "
    "(OSMesa, on the CPU)."
)
_EGL_PLATFORM_DEVICE = 0x313F
_EGL_EXTENSIONS = 0x3055
_SOFTWARE_DEVICE = b"EGL_MESA_device_software"
_MAX_DEVICES = 64
_OSMESA_LIBRARIES = ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")


_choosing_process: set[int] = set()
"""Id of the process that has chosen; unchanged in its forks."""

_MAX_SPARE_CONTEXTS: Final = 2
"""Contexts that wait for the next cameras; each holds some megabytes."""


class _SpareContext(NamedTuple):
    """A context that waits for the next cameras."""

    thread: int
    """Id of the thread in which it is current, or was: in another one it may be refused."""

    size: int
    context: Any


_spare_contexts: list[_SpareContext] = []


def require_own_opengl() -> None:
    """Raise `EnvError` in a fork of a process that has opened OpenGL, where drawing would wait
    forever.
    """
    if is_forked_with_opengl():
        raise EnvError(
            f"this process ({os.getpid()}) is a fork of one ({min(_choosing_process)}) that had opened "
            "OpenGL, expected a fork before the first image, because drawing here would wait "
            "forever; fork before the first reset, or start "
            'processes with "spawn" or "forkserver" (gymnasium\'s AsyncVectorEnv: context="spawn").'
        )


def is_forked_with_opengl() -> bool:
    """Return whether this process is a fork of one that had opened OpenGL."""
    return bool(_choosing_process) and os.getpid() not in _choosing_process


@functools.cache
def choose_graphics() -> str:
    """Return `"egl"` or `"osmesa"`, whichever works here; set `MUJOCO_GL` and `PYOPENGL_PLATFORM`
    of this process to it.

    Raises: `EnvError` naming the fault of each library and what to install.
    """
    # Before anything is opened, so that a fork in between is refused too.
    _choosing_process.add(os.getpid())
    asked = os.environ.get("MUJOCO_GL", "").lower().strip()
    if asked not in ("", "egl", "osmesa"):
        raise EnvError(
            f"MUJOCO_GL is {asked!r}, expected 'egl' or 'osmesa', which draw off screen. Unset "
            "it to choose."
        )
    bound = os.environ.get("PYOPENGL_PLATFORM", "").lower() if "OpenGL" in sys.modules else ""
    if PROCESS_INDEX_VARIABLE in os.environ:
        # the processes of a pool share the cores, so that threads of Mesa's own only cost switches:
        # a twelfth of the time of an image of 84 pixels
        os.environ.setdefault("LP_NUM_THREADS", "0")
    candidates = [asked] if asked else [bound] if bound in ("egl", "osmesa") else ["egl", "osmesa"]
    faults: dict[str, str] = {}
    for backend in candidates:
        fault = _try_egl() if backend == "egl" else _try_osmesa()
        if fault is None:
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
            return backend
        faults[backend] = fault
    details = "; ".join(f"{backend}: {fault}" for backend, fault in faults.items())
    raise EnvError(f"no off-screen OpenGL works here ({details}). {GRAPHICS_REMEDY}")


def make_context(size: int) -> Any:
    """Make an OpenGL context for images of up to `size` pixels on a side, with MuJoCo's
    `make_current` and `free`.
    """
    require_own_opengl()
    backend = choose_graphics()
    try:
        return importlib.import_module(f"mujoco.{backend}").GLContext(size, size)
    except context_errors(ImportError, AttributeError) as error:
        raise EnvError(
            f"{backend} was found, but no OpenGL context could be made ({short_cause(error)}). "
            f"{GRAPHICS_REMEDY}"
        ) from error


def take_context(size: int) -> Any:
    """Return a context that `release_context` has kept in this thread, or make one.

    A software renderer compiles its shaders anew in each context, which takes longer than to draw a
    hundred small images.
    """
    require_own_opengl()
    thread = threading.get_ident()
    for spare in _spare_contexts:
        if spare.thread == thread and spare.size >= size:
            _spare_contexts.remove(spare)
            return spare.context
    return make_context(size)


def release_context(context: Any, size: int) -> None:
    """Keep a context for the next cameras; free it if enough of them wait."""
    if len(_spare_contexts) < _MAX_SPARE_CONTEXTS:
        _spare_contexts.append(_SpareContext(threading.get_ident(), size, context))
    else:
        context.free()


def free_spare_contexts() -> None:
    """Free the contexts that wait; at exit, before EGL itself is shut down."""
    while _spare_contexts and not is_forked_with_opengl():
        _spare_contexts.pop().context.free()


def context_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of a context that cannot be made, made current or freed: MuJoCo's, and
    PyOpenGL's once that is loaded; with `others`.
    """
    # Not imported here: PyOpenGL binds the process to a platform at its first import.
    loaded = sys.modules.get("OpenGL.error")
    return (*others, RuntimeError, *(() if loaded is None else (loaded.Error,)))


def short_cause(error: Exception) -> str:
    """Return an error's text without the arguments of the call, which PyOpenGL lists over many
    lines.
    """
    code = getattr(error, "err", None)
    return str(error) if code is None else f"{getattr(code, 'name', code)}"


def device_order(is_software: Sequence[bool], process_index: int) -> list[int]:
    """Return the devices that process number `process_index` tries, in order: its own GPU, the
    others, then the CPU's.
    """
    gpus = [device for device, software in enumerate(is_software) if not software]
    turn = process_index % len(gpus) if gpus else 0
    return [
        *gpus[turn:],
        *gpus[:turn],
        *(device for device, software in enumerate(is_software) if software),
    ]


def _try_egl() -> str | None:
    """Return why EGL cannot draw here, or None if it can: then MUJOCO_EGL_DEVICE_ID is the device
    that opened.
    """
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError as error:
        return str(error)
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    names = (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT", b"eglQueryDeviceStringEXT")
    # Extensions are no symbols of the library, and have to be asked for.
    addresses = [egl.eglGetProcAddress(name) for name in names]
    if None in addresses:
        return "its driver has no device platform (EGL_EXT_platform_device)"
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
        addresses[0]
    )
    display_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(
        addresses[1]
    )
    string_of = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(addresses[2])
    devices, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int()
    if not query(_MAX_DEVICES, ctypes.byref(devices), ctypes.byref(count)) or count.value < 1:
        return "it has no device"
    order = _devices_to_try(list(devices[: count.value]), string_of)
    if isinstance(order, str):
        return order
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    for device in order:
        display = display_of(_EGL_PLATFORM_DEVICE, devices[device], None)
        if display and egl.eglInitialize(display, None, None):
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
            return None
    return f"none of its devices {order} could be opened"


def _devices_to_try(
    devices: list[int | None], string_of: Callable[[int | None, int], bytes | None]
) -> list[int] | str:
    """Return the numbers of the devices to try, the first choice first; or the error of the
    requested one.
    """
    chosen = os.environ.get("MUJOCO_EGL_DEVICE_ID", "")
    if not chosen:
        is_software = [
            _SOFTWARE_DEVICE in (string_of(device, _EGL_EXTENSIONS) or b"") for device in devices
        ]
        return device_order(is_software, int(os.environ.get(PROCESS_INDEX_VARIABLE, "0")))
    if chosen.isdigit() and int(chosen) < len(devices):
        return [int(chosen)]
    return f"MUJOCO_EGL_DEVICE_ID is {chosen!r}, expected 0 to {len(devices) - 1}"


def _try_osmesa() -> str | None:
    """Return why OSMesa cannot draw here, or None if it can."""
    for library in _OSMESA_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return None
    return f"none of {', '.join(_OSMESA_LIBRARIES)} is installed"
