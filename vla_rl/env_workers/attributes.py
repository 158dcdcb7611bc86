"""Attributes and methods of an environment in another process, as plain values.

Tuples, which a message would turn into lists, and gymnasium spaces are marked, so that they arrive
unchanged.
"""

from typing import Any

import gymnasium
from gymnasium import spaces

from vla_rl.env_workers.plain import as_plain
from vla_rl.env_workers.spaces import build_space, describe_space


def call(
    env: gymnasium.Env[Any, Any], name: str, args: list[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the marked result of a method, or the marked attribute, `name`.

    It is what `SyncVectorEnv.call` returns.

    Raises: AttributeError if neither the environment nor a wrapper has it; TypeError for a value
    that cannot be sent; any error of the method.
    """
    found: Any = env.get_wrapper_attr(name)
    return marked(found(*args, **kwargs) if callable(found) else found, name)


def marked(value: Any, name: str) -> list[Any]:
    """Mark a value for sending to another process; `unmarked` restores it.

    Raises: TypeError for what cannot be sent.
    """
    if isinstance(value, spaces.Space):
        return ["space", describe_space(value)]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [marked(part, f"{name}[{index}]") for index, part in enumerate(value)]]
    if isinstance(value, dict):
        return ["dict", {key: marked(part, f"{name}[{key!r}]") for key, part in value.items()}]
    return ["plain", as_plain(value, name)]


def unmarked(value: list[Any]) -> Any:
    """Return the value that was given to `marked`."""
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
