"""Attributes and methods of an environment in another process: what they give, as plain values on the way.

A tuple, which a message would make a list, and a gymnasium space are marked, so that they arrive as what they were.
"""

from typing import Any

import gymnasium
from gymnasium import spaces

from vla_rl.simulation.plain import as_plain
from vla_rl.simulation.spaces import build_space, describe_space


def call(env: gymnasium.Env[Any, Any], name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What the method `name` gives, or the attribute, as `SyncVectorEnv.call` does it; marked for its way.

    Raises: AttributeError if neither the environment nor a wrapper has it; TypeError for what cannot travel; whatever the
    method raises.
    """
    found: Any = env.get_wrapper_attr(name)
    return marked(found(*args, **kwargs) if callable(found) else found, name)


def marked(value: Any, name: str) -> list[Any]:
    """A value for its way to another process; `unmarked` gives it back. Raises: TypeError for what cannot travel."""
    if isinstance(value, spaces.Space):
        return ["space", describe_space(value)]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [marked(part, f"{name}[{index}]") for index, part in enumerate(value)]]
    if isinstance(value, dict):
        return ["dict", {key: marked(part, f"{name}[{key!r}]") for key, part in value.items()}]
    return ["plain", as_plain(value, name)]


def unmarked(value: list[Any]) -> Any:
    """What `marked` was given."""
    kind, content = value
    match kind:
        case "space":
            return build_space(content)
        case "tuple":
            return tuple(unmarked(part) for part in content)
        case "list":
            return [unmarked(part) for part in content]
        case "dict":
            return {key: unmarked(part) for key, part in content.items()}
    return content
