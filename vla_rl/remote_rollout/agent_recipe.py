"""An agent by name, for hosts that import it: a function, and plain arguments that are bound to it.

partial(chat_agent, limits=ChatLimits(...)) ─► AgentRecipe ─► the same partial on the host
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import msgspec

from vla_rl.actors.importable import import_path
from vla_rl.errors import ConfigError
from vla_rl.types import Agent

_PLAIN: Final = (str, int, float, bool, type(None))


class BoundArgument(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one keyword argument."""

    json: bytes
    struct: str | None = None
    """`module:Class` of a msgspec struct, such as a configuration; None for a plain value."""


class AgentRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that another process can import."""

    function: str
    """`module:function`."""

    arguments: dict[str, BoundArgument] = {}
    """Keyword arguments that are bound to it."""


def agent_recipe(agent: Agent) -> AgentRecipe:
    """Return the recipe of a function, or of a `functools.partial` with keyword arguments.

    Raises: TypeError if another process cannot import it, or for an argument that is neither a
        plain value nor a struct.
    """
    if not isinstance(agent, partial):
        return AgentRecipe(function=import_path(agent))
    if agent.args:
        raise TypeError(f"{agent} binds arguments by position: bind them by name")
    arguments = {name: _bound(agent, name, value) for name, value in agent.keywords.items()}
    return AgentRecipe(function=import_path(agent.func), arguments=arguments)


def made_agent(recipe: AgentRecipe) -> Agent:
    """Return the agent of a recipe. Raises: ConfigError if this host cannot import it."""
    function: Callable[..., Any] = imported(recipe.function)
    arguments = {
        name: msgspec.json.decode(
            bound.json, type=Any if bound.struct is None else imported(bound.struct)
        )
        for name, bound in recipe.arguments.items()
    }
    return partial(function, **arguments) if arguments else function


def imported(path: str) -> Any:
    """Return what `module:name` names. Raises: ConfigError if this host cannot import it."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this host cannot import {path}: {error}; expected the same modules as on the control "
            "process's host, in a package that is installed, or on PYTHONPATH of `vla-rl host`"
        ) from error


def _bound(agent: "partial[Any]", name: str, value: object) -> BoundArgument:
    if isinstance(value, msgspec.Struct):
        return BoundArgument(json=msgspec.json.encode(value), struct=import_path(type(value)))
    if not isinstance(value, _PLAIN):
        raise TypeError(
            f"{agent} binds {name!r} to a {type(value).__name__}; expected text, numbers or a "
            "configuration, or a function of its own in a module"
        )
    return BoundArgument(json=msgspec.json.encode(value))
