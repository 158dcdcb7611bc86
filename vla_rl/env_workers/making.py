"""Make a gymnasium environment by its id.

Errors name an unknown id or argument and the nearest known one.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered, load_env_creator

from vla_rl.env_workers.wrapping import wrapped
from vla_rl.errors import EnvError
from vla_rl.types import EnvSpec

FOR_GYMNASIUM = ("max_episode_steps", "disable_env_checker", "render_mode")
"""Arguments of `gymnasium.make` itself."""


def make_env(spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    """Build the environment in its wrappers.

    Raises: EnvError for an unknown id, argument or wrapper; any error of the environment's code.
    """
    refuse_unknown_arguments(spec, registered(spec.id))
    return wrapped(gymnasium.make(spec.id, disable_env_checker=True, **spec.kwargs), spec.wrappers)


def registered(env_id: str) -> Registered:
    """Return gymnasium's entry for an id such as "module:id".

    Imports the module first, or `vla_rl.envs` if there is none.

    Raises: EnvError if there is no such module or no such environment; any error of importing the
    module.
    """
    module, _, name = env_id.rpartition(":")
    try:
        importlib.import_module(module or "vla_rl.envs")
    except ModuleNotFoundError as error:
        # one that the module itself imports
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise EnvError(
            f"{env_id} could not be made: there is no module {error.name!r}, expected the one that "
            f"registers {name!r}, in the folder of the script or on PYTHONPATH"
        ) from None
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise EnvError(
            f"{env_id} could not be made: {_unregistered(module, name)} ({error})"
        ) from None


def creator_of(found: Registered) -> Callable[..., Any]:
    """Return the class or function that makes a registered environment.

    Raises: EnvError if it has none.
    """
    entry_point: Any = found.entry_point
    if entry_point is None:
        raise EnvError(
            f"{found.id} could not be made: it is registered without an entry_point "
            "for one environment"
        )
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def refuse_unknown_arguments(spec: EnvSpec, found: Registered) -> None:
    """Raise EnvError for an argument that the environment's constructor does not take."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(
            creator_of(found)
        ).parameters
    except (TypeError, ValueError):  # it cannot be inspected; making it will show the error
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in spec.kwargs:
        if name not in parameters and name not in FOR_GYMNASIUM:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"its arguments: {', '.join(parameters) or 'none'}"
            )
            raise EnvError(
                f"{spec.id} with {spec.kwargs} could not be made: it has no argument "
                f"{name!r}; {hint}"
            )


def _unregistered(module: str, name: str) -> str:
    if module:
        return (
            f"the module {module!r} registers no {name!r}; call gymnasium.register(id={name!r}, "
            "entry_point=...) in it"
        )
    return f"nothing registers {name!r}; write 'module:{name}', with your module that does"
