"""Read a configuration from a TOML or JSON file.

An unknown key is an error that names the nearest known one.
"""

import difflib
import os
import shlex
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.reporting.run_directory import require_digest
from vla_rl.types import Config
from vla_rl.util.values import shorten_middle

ConfigT = TypeVar("ConfigT", bound=Config)


SHIPPED: Final = Path(__file__).parents[1] / "recipes" / "configs"
"""Configurations of published experiments, by name."""


def found_config(name: str) -> Path:
    """Return the file at this path, or the shipped configuration of this name."""
    shipped = SHIPPED / f"{name}.toml"
    # os.path: pathlib raises for a name that is too long
    return shipped if os.path.exists(shipped) and not os.path.exists(name) else Path(name)


def read_config(path: Path, config_type: type[ConfigT]) -> ConfigT:
    """Read `path` (.toml or .json) as `config_type`; fields that the file leaves out keep their
    defaults.

    Raises: `ConfigError` naming the file and the key if the file cannot be read, is not TOML or
    JSON, does not match the digest beside it, or holds an unknown key, a value of another type or
    one that the configuration rejects.
    """
    return convert(read_table(path, config_type), config_type, str(path))


def read_table(path: Path, config_type: type[Config]) -> dict[str, Any]:
    """Read `path` (.toml or .json) as nested tables with keys that `config_type` has.

    Raises: `ConfigError`.
    """
    decoders: dict[str, Callable[[bytes], Any]] = {
        ".toml": msgspec.toml.decode,
        ".json": msgspec.json.decode,
    }
    if os.path.isdir(path):
        raise ConfigError(
            f"{shorten_middle(path)} is a folder, expected a .toml or .json file; --resume continues the "
            f"run in a folder, and --config {shlex.quote(str(path / 'config.json'))} takes its "
            "settings alone"
        )
    if path.suffix not in decoders:
        shipped = difflib.get_close_matches(path.name, [each.stem for each in SHIPPED.iterdir()], 1)
        nearest = f"; did you mean the shipped {shipped[0]!r}?" if shipped else ""
        raise ConfigError(
            f"{shorten_middle(path)} ends in {path.suffix!r}, expected a file in one of "
            f"{', '.join(decoders)}{nearest}"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the configuration {shorten_middle(path)} cannot be read: {error.strerror}"
        ) from error
    require_digest(path, content)
    try:
        data = decoders[path.suffix](content)
    except (ValueError, RecursionError) as error:  # invalid TOML, JSON or UTF-8
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()} in UTF-8: {error}") from error
    refuse_unknown_keys(data, config_type, where=str(path))
    table: dict[str, Any] = data
    return table


def convert(table: dict[str, Any], config_type: type[ConfigT], where: str) -> ConfigT:
    """Convert nested tables to `config_type`; `where` begins the error's message.

    Raises: `ConfigError` for a value of another type.
    """
    try:
        return msgspec.convert(table, config_type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def refuse_unknown_keys(data: Any, config_type: Any, where: str) -> None:
    """Raise `ConfigError` for the first key of nested `data` that `config_type` lacks."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {data!r}, expected a table of {config_type.__name__}")
    hints = typing.get_type_hints(config_type)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            advice = (
                f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(hints))}"
            )
            raise ConfigError(f"{where}: unknown key {key!r} of {config_type.__name__}; {advice}")
        nested = _nested_config(hints[key])
        if nested is not None and value is not None:
            refuse_unknown_keys(value, nested, where=f"{where}: {key}")


def _nested_config(hint: Any) -> type[Config] | None:
    candidates = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None
