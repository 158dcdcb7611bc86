"""Options that nothing reads under the other values of a configuration.

The help leaves them out, and the command line refuses to set them.

Each configuration names its own in `Config.unread`; pipelines name what they read in `READS`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.registry import unused_by_pipeline
from vla_rl.types import Config


def unread_options(config: Config) -> dict[str, str]:
    """Return unread options of a configuration and its tables, by dotted path, with reasons."""
    found = dict(config.unread())
    if isinstance(config, LearningConfig):
        found = {**unused_by_pipeline(config.pipeline), **found}
    for name in config.__struct_fields__:
        table = getattr(config, name)
        if isinstance(table, Config) and name not in found:
            found |= {f"{name}.{path}": why for path, why in unread_options(table).items()}
    return found


def refuse_unread(config: Config, defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first option that was set though nothing reads it.

    Args:
        config: configuration with the values of the command line.
        defaults: nested values of the options that were not set.
    """
    values = msgspec.to_builtins(config, enc_hook=str)
    for path, why in unread_options(config).items():
        table, default = values, dict(defaults)
        *parents, name = path.split(".")
        for parent in parents:
            table, default = table.get(parent, {}), default.get(parent, {})
        if name not in table or name not in default:
            continue
        changed = _first_difference(path, table[name], default[name])
        if changed is not None:
            option, value = changed
            raise ConfigError(
                f"{option} is {value!r}, but nothing would read it: {why}; leave it out"
            )


def _first_difference(path: str, value: Any, default: Any) -> tuple[str, Any] | None:
    """Return the path and value of the first leaf of `value` that differs from the default."""
    if not (isinstance(value, dict) and isinstance(default, dict)):
        return None if value == default else (path, value)
    for key, inner in value.items():
        if key in default and (found := _first_difference(f"{path}.{key}", inner, default[key])):
            return found
    return None
