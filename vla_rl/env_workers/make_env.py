"""Make a gymnasium environment by its id, in its wrappers, from what was prepared before a fork.

Errors name an unknown id, argument or wrapper and the nearest known one.

An environment's class may have `prepare`, a classmethod with the keyword arguments of its
constructor. A fork server calls it before its first fork. It builds costly data that is never written
to again, without any OpenGL, and keeps it in its module; an instance made later with the same
arguments, in a fork of this process, uses that data.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium
import msgspec
from gymnasium.envs.registration import EnvSpec as Registered, load_env_creator
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from vla_rl.actors import PrepareHook
from vla_rl.env_workers.spaces import as_plain
from vla_rl.errors import ConfigError, EnvError
from vla_rl.types import EnvSpec, WrapperSpec
from vla_rl.util.imports import import_path, load_named, suggest
from vla_rl.util.processes import refuse_threads
from vla_rl.util.values import excerpt, find_part_without_json

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
    # The name and not the function: a pickled function would bring its author's code into a process
    # that did not import it, and this package sends no pickles.
    path = import_path(wrapper.func)
    if wrapper.args:
        raise TypeError(
            f"the partial of {path} has positional arguments, expected keywords only: "
            f"{wrapper.args}"
        )
    return WrapperSpec(
        path=path, kwargs={key: as_plain(value, key) for key, value in wrapper.keywords.items()}
    )


def wrap_env(
    env: gymnasium.Env[Any, Any], wrappers: Iterable[WrapperSpec]
) -> gymnasium.Env[Any, Any]:
    """Return the environment in its wrappers, innermost first.

    Raises: EnvError for a path that does not name one.
    """
    for wrapper in wrappers:
        wrap = load_named(wrapper.path, "the wrapper", "class", callable, EnvError)
        env = wrap(env, **wrapper.kwargs)
    return env


def needs_every_step(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether a wrapper may look at the images of every step, or end the episode after it.

    A wrapper class that does neither says so by `reads_images = False`.
    """
    while isinstance(env, gymnasium.Wrapper):
        if not isinstance(env, CHECKS_ONLY) and getattr(type(env), "reads_images", True):
            return True
        env = env.env
    return False


def get_wrapper_classes(env: gymnasium.Env[Any, Any]) -> frozenset[str]:
    """Return `module:name` of the class of each wrapper, and of its base classes."""
    found: set[str] = set()
    while isinstance(env, gymnasium.Wrapper):
        found |= {f"{kind.__module__}:{kind.__qualname__}" for kind in type(env).__mro__[:-1]}
        env = env.env
    return frozenset(found)


BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by name."""

FOR_GYMNASIUM = ("max_episode_steps", "disable_env_checker", "render_mode")
"""Arguments of `gymnasium.make` itself."""


def make_env(spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    """Build the environment in its wrappers.

    Raises: EnvError for an unknown id, argument or wrapper; any error of the environment's code.
    """
    check_arguments(spec, get_registration(spec.id))
    return wrap_env(gymnasium.make(spec.id, disable_env_checker=True, **spec.kwargs), spec.wrappers)


def get_registration(env_id: str) -> Registered:
    """Return gymnasium's entry for an id such as "module:id".

    Imports the module first, or `vla_rl.envs` if there is none.

    Raises: EnvError if there is no such module or no such environment; any error of importing the
    module.
    """
    # imported here and not by gymnasium.make, so that an error inside of the module keeps its traceback
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
            f"{env_id} could not be made: {_explain_unregistered(module, name)} ({error})"
        ) from None


def get_creator(found: Registered) -> Callable[..., Any]:
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


def check_arguments(spec: EnvSpec, found: Registered) -> None:
    """Raise EnvError for an argument that the environment's constructor does not take, or needs."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(
            get_creator(found)
        ).parameters
    except (TypeError, ValueError):  # it cannot be inspected; making it will show the error
        return
    # A constructor with **kwargs may take anything: only the environment itself can tell.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in spec.kwargs:
        if name not in parameters and name not in FOR_GYMNASIUM:
            raise EnvError(
                f"{spec.id} with {spec.kwargs} could not be made: it has no argument "
                f"{name!r}{suggest(name, parameters)}"
            )
    given = {**found.kwargs, **spec.kwargs}
    for name, parameter in parameters.items():
        has_default = parameter.default is not parameter.empty
        if not has_default and parameter.kind in BY_NAME and name not in given:
            raise EnvError(
                f"{spec.id} with {spec.kwargs} could not be made: it needs the argument {name!r}; give it "
                f"in kwargs={{{name!r}: ...}}"
            )


def _explain_unregistered(module: str, name: str) -> str:
    if module:
        return (
            f"the module {module!r} registers no {name!r}; call gymnasium.register(id={name!r}, "
            "entry_point=...) in it"
        )
    return f"nothing registers {name!r}; write 'module:{name}', with your module that does"


_NOT_PASSED_ON = ("max_episode_steps", "disable_env_checker")
"""Arguments that `gymnasium.make` does not pass on."""

_DRIVERS = ("_dri.so", "libgallium", "libnvidia-eglcore", "libnvidia-glcore", "libcuda.so")
"""Libraries of a process that has opened a display or a GPU; a later fork of it hangs when it
renders."""


def prepare_hook(specs: Iterable[EnvSpec]) -> PrepareHook:
    """Return the hook that prepares these environments, each of them once.

    Raises: ConfigError, naming the argument, for one that is no plain value.
    """
    specs = tuple(specs)
    for spec in specs:
        if (found := find_part_without_json(spec, f"the EnvSpec of {spec.id}")) is not None:
            part, value = found
            raise ConfigError(
                f"{part} is {excerpt(value)}, a {type(value).__name__}, expected numbers, strings, "
                "booleans, None, or lists and dicts of them; of an array, pass array.tolist()"
            )
    # a run has thousands of specs of a few environments; each is prepared once
    distinct = {msgspec.json.encode(spec, order="deterministic"): spec for spec in specs}
    plain = [{"id": spec.id, "kwargs": spec.kwargs} for spec in distinct.values()]
    return PrepareHook(f"{__name__}:prepare_envs", {"specs": plain})


def prepare_envs(specs: list[dict[str, Any]]) -> None:
    """Import the specs' environments, and call `prepare` if the class has it.

    Raises: EnvError naming the environment.
    """
    # "could not be made", as when it is built without a preparation: the fault is the same
    for spec in specs:
        try:
            _prepare_env(spec["id"], spec["kwargs"])
        except EnvError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # each error of the environment's code is its own fault
            arguments = f" with {spec['kwargs']}" if spec["kwargs"] else ""
            raise EnvError(f"{spec['id']}{arguments} could not be made: {error!r}") from error


def _prepare_env(env_id: str, kwargs: dict[str, Any]) -> None:
    found = get_registration(env_id)
    check_arguments(EnvSpec(id=env_id, kwargs=kwargs), found)
    prepare = getattr(get_creator(found), "prepare", None)
    if prepare is not None:
        given = {**found.kwargs, **kwargs}
        prepare(**{name: value for name, value in given.items() if name not in _NOT_PASSED_ON})
    # a fork copies one thread: a lock that another one holds is never released in the child
    refuse_threads("preparing it")
    if drivers := _loaded_drivers():
        raise RuntimeError(
            f"preparing it loaded {', '.join(drivers)}: a process that has opened a display or a "
            "GPU cannot be forked; "
            'leave that to the constructor, or set start="spawn"'
        )


def _loaded_drivers() -> list[str]:
    names = {
        line.rsplit("/", 1)[-1]
        for line in Path("/proc/self/maps")
        .read_text(encoding="utf-8", errors="replace")
        .splitlines()
        if ".so" in line
    }
    return sorted(name for name in names if any(driver in name for driver in _DRIVERS))
