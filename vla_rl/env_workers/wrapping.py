"""Wrappers of gymnasium that are named here, and imported and applied in another process."""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from vla_rl.actors.importable import import_path
from vla_rl.env_workers.plain import as_plain
from vla_rl.errors import EnvError
from vla_rl.types import WrapperSpec

CHECKS_ONLY: Final = (OrderEnforcing, PassiveEnvChecker)
"""Wrappers of `gymnasium.make` that neither read observations nor end episodes."""


def wrapper_spec(wrapper: Callable[..., Any] | WrapperSpec) -> WrapperSpec:
    """Name a wrapper class, a function that wraps, or a partial of one with keywords.

    A partial is made by `functools.partial`.

    Raises: TypeError for a wrapper that another process cannot import, such as a lambda, and for
    arguments that cannot be sent.
    """
    if isinstance(wrapper, WrapperSpec):
        return wrapper
    if not isinstance(wrapper, functools.partial):
        return WrapperSpec(path=import_path(wrapper))
    path = import_path(wrapper.func)
    if wrapper.args:
        raise TypeError(
            f"the partial of {path} has positional arguments, expected keywords only: "
            f"{wrapper.args}"
        )
    return WrapperSpec(
        path=path, kwargs={key: as_plain(value, key) for key, value in wrapper.keywords.items()}
    )


def wrapped(
    env: gymnasium.Env[Any, Any], wrappers: Iterable[WrapperSpec]
) -> gymnasium.Env[Any, Any]:
    """Return the environment in its wrappers, innermost first.

    Raises: EnvError for a path that does not name one.
    """
    for wrapper in wrappers:
        module, _, name = wrapper.path.partition(":")
        try:
            wrap: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError, ValueError) as error:
            raise EnvError(
                f"the wrapper {wrapper.path!r} cannot be found, expected 'module:name': {error}"
            ) from error
        env = wrap(env, **wrapper.kwargs)
    return env


def shows_every_step(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether a wrapper may look at every step, or end the episode after it."""
    while isinstance(env, gymnasium.Wrapper):
        if not isinstance(env, CHECKS_ONLY):
            return True
        env = env.env
    return False


def classes_of_wrappers(env: gymnasium.Env[Any, Any]) -> frozenset[str]:
    """Return `module:name` of the class of each wrapper, and of its base classes."""
    found: set[str] = set()
    while isinstance(env, gymnasium.Wrapper):
        found |= {f"{kind.__module__}:{kind.__qualname__}" for kind in type(env).__mro__[:-1]}
        env = env.env
    return frozenset(found)
