"""Load the package metaworld, without OpenGL and only in the version whose results are known."""

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vla_rl.envs.mujoco.loading import importing, load_mujoco
from vla_rl.errors import EnvError, PackageError
from vla_rl.util.installing import pip_command

VERSION: Final = "3.0.0"
"""Version whose tasks, success criteria and experts this package was made for."""


class MetaWorldCode(NamedTuple):
    """The loaded package."""

    envs: Mapping[str, Any]
    """Class of each task's environment, by its full name, such as `drawer-open-v3`."""

    experts: Mapping[str, Any]
    """Class of each task's scripted policy, by the same names."""


@functools.cache
def load_metaworld() -> MetaWorldCode:
    """Import metaworld, once in a process, without OpenGL, so that the process can still fork.

    Raises: `ImportError` if it is not installed, `EnvError` for another version.
    """
    try:
        found = importlib.metadata.version("metaworld")
    except importlib.metadata.PackageNotFoundError:
        raise PackageError(
            f"Meta-World is not installed; run `{pip_command('metaworld')}`."
        ) from None
    if found != VERSION:
        raise EnvError(
            f"metaworld is {found}, expected {VERSION}, because tasks and experts differ between "
            f"versions; run `{pip_command('metaworld')}`."
        )
    load_mujoco()
    with importing():
        envs = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
        experts = importlib.import_module("metaworld.policies").ENV_POLICY_MAP
    return MetaWorldCode(envs, experts)
