"""The command line of every recipe: an option for each field, and options to launch it.

vla-rl srpo_libero --help                                 the common options, explained
vla-rl srpo_libero --help-all                             every option that the recipe reads
vla-rl srpo_libero --config my.toml --run.updates 20      a file; the command line overrides it
vla-rl srpo_libero --dry-run                              the configuration and the plan

A configuration file is TOML or JSON; an unknown key in it is an error that names the nearest known one.
"""

import argparse
import codecs
import contextlib
import dataclasses
import difflib
import functools
import io
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

import msgspec
import tyro
from tyro.constructors import ConstructorRegistry

from vla_rl.cli.arguments import (
    print_nearest_options,
    refuse_missing_options,
    refuse_repeated_lists,
    refuse_values_of_flags,
)
from vla_rl.cli.help import HELP_ALL, option_registry, print_help, program_name
from vla_rl.cli.option_rules import drop_parameters, follow, list_names, refuse_unused_options
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.registry import merge_tables, pipeline_settings
from vla_rl.reporting.run_directory import RunDirectory, require_digest
from vla_rl.types import Config
from vla_rl.types.config import explain_refusal
from vla_rl.util.values import shorten_middle


@dataclasses.dataclass(frozen=True)
class Launch:
    """Launch options of every recipe."""

    recorded_before: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields of the configuration that are younger than some records of runs, and the values that
    those runs used; a resume takes them instead of today's defaults."""

    config: Path | None = None
    """Read the configuration from this .toml or .json file, such as a run's config.json, or from
    one that ships with the package, such as srpo_openvla_oft_libero_goal; the command line
    overrides it."""

    dry_run: bool = False
    """Print the plan and the resolved configuration, and read every file that the command would
    read: the policy is loaded, and each environment is opened once. Nothing is trained and nothing
    is written."""


@dataclasses.dataclass(frozen=True)
class TrainingLaunch(Launch):
    """Launch options of a training recipe."""

    draw: Path | None = None
    """Draw the graph into this .svg or .png file (mermaid text without graphviz); start nothing."""

    resume: Path | None = None
    """Resume the run in this directory, with its own configuration, from its newest complete
    checkpoint; from the beginning if it has none."""

    resume_from: str | None = None
    """With --resume: resume from this checkpoint, such as update-000012, instead of the newest.
    Newer ones are renamed."""


_COMMAND: Final = "RecipeCommand"
"""Name of the class that holds a recipe's launch options and its configuration."""

LaunchT = TypeVar("LaunchT", bound=Launch)
ConfigT = TypeVar("ConfigT", bound=Config)
LaunchT_co = TypeVar("LaunchT_co", bound=Launch, covariant=True)
ConfigT_co = TypeVar("ConfigT_co", bound=Config, covariant=True)


@dataclasses.dataclass(frozen=True)
class Command(Generic[LaunchT_co, ConfigT_co]):
    """A recipe's configuration and its launch options."""

    launch: LaunchT_co
    config: ConfigT_co


def parse_command(
    launch_type: type[LaunchT],
    config_type: type[ConfigT],
    description: str,
    argv: list[str] | None = None,
) -> Command[LaunchT, ConfigT]:
    """Parse the command line of a recipe.

    Help, unknown options and bad values end the process with a message.

    Precedence: the command line, then `--config` (or the configuration of the run named by
    `--resume`), then the settings of the pipeline (if there is one), then the recipe's defaults.
    Raises: `ConfigError` if the file or the combination of values is invalid.
    """
    arguments = [
        _expand_engine_option(argument) for argument in (sys.argv[1:] if argv is None else argv)
    ]
    refuse_missing_options(arguments)
    # read before all others, because the defaults of the others depend on these
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=found_config)
    early.add_argument("--resume", type=Path)
    early.add_argument("--pipeline")
    known, _ = early.parse_known_args(arguments)
    if known.resume is not None and known.config is not None:
        raise ConfigError(
            f"--config {known.config} and --resume {known.resume} were both given, expected one of "
            "them: a resumed run has its own configuration; change settings with options"
        )
    path = RunDirectory.existing(known.resume).config if known.resume is not None else known.config
    recorded_before = launch_type.recorded_before if known.resume is not None else {}
    default = _defaults(
        config_type,
        path,
        known.pipeline,
        recorded_before,
        arguments,
        is_resume=known.resume is not None,
    )

    # built here because only here the types of its fields are known; with empty names, tyro gives
    # options no prefix
    fields: list[tuple[str, Any, Any]] = [
        ("launch", Annotated[launch_type, tyro.conf.arg(name="")], launch_type()),
        ("config", Annotated[config_type, tyro.conf.arg(name="")], default),
    ]
    command_type = dataclasses.make_dataclass(_COMMAND, fields, frozen=True)
    parse = functools.partial(tyro.cli, command_type, prog=program_name())
    if not {HELP_ALL, "-h", "--help"}.isdisjoint(arguments):
        _show_help(parse, arguments, default, description)
    options = _options_in(command_type)
    refuse_values_of_flags(arguments, {name for name, hint in options.items() if hint is bool})
    refuse_repeated_lists(arguments, {name for name, hint in options.items() if _is_list(hint)})
    try:
        parsed: Any = parse(args=arguments, registry=option_registry(), description=description)
    except SystemExit:
        print_nearest_options(arguments, options.keys())
        raise
    _require_run_to_resume(parsed.launch)
    # A file is checked by itself, so that `--embedding.encoder pixels` may leave the settings of the
    # file's own encoder unread; a resumed run keeps what its configuration says.
    if known.config is not None:
        refuse_unused_options(default, _unset_values(config_type, default))
    refuse_unused_options(parsed.config, msgspec.to_builtins(default, enc_hook=str))
    return Command(parsed.launch, parsed.config)


def _show_help(
    parse: Callable[..., Any], arguments: list[str], default: Config, description: str
) -> None:
    """Print the help of the options that are read with the given values."""
    others = [argument for argument in arguments if argument not in (HELP_ALL, "-h", "--help")]

    def show(registry: ConstructorRegistry, description: str) -> Any:
        return parse(args=[*others, "--help"], registry=registry, description=description)

    # `--engine vllm --help-all` shows vLLM's options; help is shown for wrong values too
    set_values = default
    if others:
        with (
            contextlib.suppress(SystemExit, ConfigError),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            set_values = parse(args=others, registry=option_registry()).config
    print_help(show, default, set_values, description, wants_all=HELP_ALL in arguments)


def _options_in(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Return the types of the options of a class's fields, by their names without dashes."""
    options: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is ClassVar:
            continue
        option = f"{prefix}{name.replace('_', '-')}"
        if isinstance(hint, type) and (issubclass(hint, Config) or dataclasses.is_dataclass(hint)):
            options |= _options_in(hint, "" if kind.__name__ == _COMMAND else f"{option}.")
        else:
            options[option] = hint
    return options


def _is_list(hint: Any) -> bool:
    return any(... in typing.get_args(each) for each in (hint, *typing.get_args(hint)))


def _require_run_to_resume(launch: Launch) -> None:
    if (
        isinstance(launch, TrainingLaunch)
        and launch.resume_from is not None
        and launch.resume is None
    ):
        raise ConfigError(
            f"--resume-from is {launch.resume_from!r}, expected --resume with the run's directory "
            "as well"
        )


def _expand_engine_option(argument: str) -> str:
    """Spell out `--engine vllm` as the option for the engine's kind.

    `engine` is a table of settings.
    """
    name, equals, value = argument.partition("=")
    return f"--engine.kind{equals}{value}" if name == "--engine" else argument


def _defaults(
    config_type: type[ConfigT],
    path: Path | None,
    pipeline: str | None,
    recorded_before: Mapping[str, Any],
    arguments: Sequence[str],
    *,
    is_resume: bool,
) -> ConfigT:
    """Return the values of options that the command line does not give; they fit those that it
    gives.
    """
    known = config_type.__struct_fields__
    younger = {name: value for name, value in recorded_before.items() if name in known}
    in_file = {} if path is None else {**younger, **read_table(path, config_type)}
    if not issubclass(config_type, LearningConfig):
        values = merge_tables(msgspec.to_builtins(config_type(), enc_hook=str), in_file)
        followed = follow(values, in_file, arguments)
        given = merge_tables(values, followed) if followed else in_file
        return convert(given, config_type, "the defaults" if path is None else str(path))
    recipe = config_type()
    chosen = {} if pipeline is None else {"pipeline": pipeline}
    name = chosen.get("pipeline") or in_file.get("pipeline") or recipe.pipeline
    where = str(path) if path is not None else f"the settings of the pipeline {name}"
    settings = (pipeline_settings(name), recipe.task_settings(name))
    unset = drop_parameters(merge_tables(msgspec.to_builtins(recipe), *settings), arguments)
    values = merge_tables(unset, drop_parameters(in_file, arguments), chosen)
    # what a run recorded may be a default of that run
    followed = follow(values, {} if is_resume else in_file, arguments)
    return convert(merge_tables(values, followed), config_type, where)


def _unset_values(config_type: type[ConfigT], given: ConfigT) -> dict[str, Any]:
    """Return the values that options have if neither a file nor the command line gives them."""
    values: dict[str, Any] = msgspec.to_builtins(config_type(), enc_hook=str)
    if isinstance(given, LearningConfig):
        # parameters of another loss than the given one have no values here
        return merge_tables(
            values,
            pipeline_settings(given.pipeline),
            given.task_settings(given.pipeline),
            list_names(msgspec.to_builtins(given)),
        )
    return values


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
        # Windows' editors begin a file with a mark that is no part of TOML or JSON.
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(
            f"the configuration {shorten_middle(path)} cannot be read: {error.strerror}"
        ) from error
    require_digest(path, content)
    try:
        data = decoders[path.suffix](content)
    except (ValueError, RecursionError) as error:  # invalid TOML, JSON or UTF-8
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()} in UTF-8: {error}") from error
    rename_former_keys(data, config_type)
    refuse_unknown_keys(data, config_type, where=str(path))
    table: dict[str, Any] = data
    return table


def rename_former_keys(data: Any, config_type: type[Config]) -> None:
    """Give keys of nested `data` that earlier versions wrote their names of today."""
    if not isinstance(data, dict):
        return
    for former, name in config_type.FORMER_NAMES.items():
        if former in data and name not in data:
            data[name] = data.pop(former)
    for name, values in config_type.FORMER_VALUES.items():
        if isinstance(value := data.get(name), str):
            data[name] = values.get(value, value)
    hints = typing.get_type_hints(config_type)
    for key, value in data.items():
        nested = _nested_config(hints.get(key))
        if nested is not None:
            rename_former_keys(value, nested)


def convert(table: dict[str, Any], config_type: type[ConfigT], where: str) -> ConfigT:
    """Convert nested tables to `config_type`; `where` begins the error's message.

    Raises: `ConfigError` for a value of another type or out of range.
    """
    try:
        return msgspec.convert(table, config_type)
    except msgspec.ValidationError as error:
        problem = _find_refused_value(table, config_type, str(error)) or error
        raise ConfigError(f"{where}: {problem}") from error


def _find_refused_value(table: Any, config: type[Config], error: str) -> str | None:
    """Explain the value at the path in msgspec's error, which has the path alone."""
    for name in re.findall(r"\.(\w+)", error.rpartition("`$")[2]):
        nested = _nested_config(typing.get_type_hints(config)[name])
        if nested is None or not isinstance(table[name], dict):
            return explain_refusal(config, name, table[name])
        # the values of a table that do not fit each other: its class says why, in msgspec's error
        table, config = table[name], nested
    return None


def refuse_unknown_keys(data: Any, config_type: Any, where: str) -> None:
    """Raise `ConfigError` for the first key of nested `data` that `config_type` lacks."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {data!r}, expected a table of {config_type.__name__}")
    types_by_name = typing.get_type_hints(config_type)
    hints = {name: types_by_name[name] for name in config_type.__struct_fields__}
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
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for candidate in typing.get_args(hint) if is_union else (hint,):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None
