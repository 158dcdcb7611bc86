"""Rules between the options of a command line.

A default is never the reason why a setting is refused: a recipe's defaults fit each other, and if the
user sets one of two options that depend on each other, the default of the other one follows. If both
are set and do not fit, that is refused.

An option that nothing reads under the other values is left out of the help and refused if it is set:
each configuration has a table of its own, `Config.READ_IF`, and pipelines name what they read in `READS`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.registry import NAMED_TABLES, unused_by_pipeline
from vla_rl.types import Config

Options = dict[str, Any]
"""Values by dotted name, such as `scheduler.groups_per_update`."""


class Follows(NamedTuple):
    """An option whose default depends on others."""

    option: str
    depends_on: tuple[str, ...]
    value: Callable[[Options], Any]
    """Returns the default for the other values; that of the recipe if it fits."""

    is_number: bool = True
    """Whether the options that it depends on are whole numbers, or none."""


def _groups(options: Options) -> int:
    groups, most = (
        options["scheduler.groups_per_update"],
        options["scheduler.max_outstanding_groups"],
    )
    return int(groups if most is None else max(1, min(groups, most)))


def _capacity(options: Options) -> int:
    """Return the number of episodes that can be outstanding."""
    groups, most = (
        options["scheduler.groups_per_update"],
        options["scheduler.max_outstanding_groups"],
    )
    by_staleness = (options["scheduler.max_staleness"] + 1) * groups
    in_flight = by_staleness if most is None else min(by_staleness, most)
    return int(in_flight * options["group_size"])


def _simulators(options: Options) -> int:
    most = _capacity(options) - options.get("text.num_envs", 0)
    # if conversations run as well, and their default does not fit either, each has its half
    if most < 1:
        most = _capacity(options) // 2
    return int(max(1, min(options["simulators.num_envs"], most)))


def _conversations(options: Options) -> int:
    most = _capacity(options) - options.get("simulators.num_envs", 0)
    return int(max(1, min(options["text.num_envs"], most)))


def _warmup(who: str, options: Options) -> int:
    """Return fewer steps than the decay has: it would begin with the warm-up's end."""
    warmup = options[f"{who}.optimizer.warmup_steps"]
    decay = options[f"{who}.optimizer.decay_steps"]
    return int(max(0, min(warmup, decay - 1)) if isinstance(decay, int) else warmup)


def _decay(who: str, options: Options) -> Any:
    """Return none instead of `run` for another policy than the shipped one: published policies are
    trained at a constant rate.
    """
    warmup = options[f"{who}.optimizer.warmup_steps"]
    decay = options[f"{who}.optimizer.decay_steps"]
    if isinstance(decay, int) and isinstance(warmup, int):
        return max(decay, warmup + 1)
    # a critic starts from random weights, whatever the policy is
    if decay != "run" or who != "learner":
        return decay
    # the layouts of checkpoints come with it, which most recipes do without
    from vla_rl.models.shipped import is_base_policy

    return decay if is_base_policy(options["policy"]) else None


def _ranks(options: Options) -> int:
    ranks, parallel = options["learner.ranks"], options["learner.tensor_parallel"]
    return int(ranks if parallel < 1 else -(-ranks // parallel) * parallel)


PLANNER_SHAPE: Final = {
    "hidden_size": 128, "num_layers": 4, "num_heads": 4, "intermediate_size": 512, "context_size": 2048,
    "vocab_size": 1024,
}  # fmt: skip
"""Sizes of a new language model for requests, those of the planner that ships."""


def _for_plans(name: str, size: int, options: Options) -> int:
    return size if options["task"] == "requests" else int(options[f"shape.{name}"])


def _planner_rate(options: Options) -> float:
    """Return a rate that a public language model stands; the small ones of this package take a larger one."""
    own = options["planner_policy"] in ("shipped", "new")
    return float(options["planner_optimizer.lr"]) if own else 1.5e-5


def _steering(options: Options) -> str:
    """Return what dsrl learns, the noise of a frozen policy, instead of a kind that it cannot learn."""
    kind: str = options["steering.kind"]
    return "noise" if options.get("off_policy.algorithm") == "dsrl" else kind


CAPACITY: Final = (
    "group_size",
    "scheduler.groups_per_update",
    "scheduler.max_staleness",
    "scheduler.max_outstanding_groups",
)

FOLLOWING: Final = (
    Follows("scheduler.groups_per_update", ("scheduler.max_outstanding_groups",), _groups),
    Follows("simulators.num_envs", (*CAPACITY, "text.num_envs"), _simulators),
    Follows("text.num_envs", (*CAPACITY, "simulators.num_envs"), _conversations),
    Follows(
        "learner.optimizer.warmup_steps",
        ("learner.optimizer.decay_steps",),
        partial(_warmup, "learner"),
    ),
    Follows(
        "learner.optimizer.decay_steps",
        ("learner.optimizer.warmup_steps", "policy"),
        partial(_decay, "learner"),
        is_number=False,
    ),
    Follows(
        "critic.optimizer.warmup_steps",
        ("critic.optimizer.decay_steps",),
        partial(_warmup, "critic"),
    ),
    Follows(
        "critic.optimizer.decay_steps",
        ("critic.optimizer.warmup_steps",),
        partial(_decay, "critic"),
    ),
    Follows("learner.ranks", ("learner.tensor_parallel",), _ranks),
    Follows("steering.kind", ("off_policy.algorithm",), _steering, is_number=False),
    Follows("planner_optimizer.lr", ("planner_policy",), _planner_rate, is_number=False),
    *(
        Follows(f"shape.{name}", ("task",), partial(_for_plans, name, size), is_number=False)
        for name, size in PLANNER_SHAPE.items()
    ),
)
"""Every option whose default depends on others, in the order in which they follow."""


def follow(
    defaults: Mapping[str, Any], in_file: Mapping[str, Any], arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the defaults of a recipe that follow what a file and the command line set.

    Args:
        defaults: values of all options, with those of the file; nested as in a file.
        in_file: what the file sets.
        arguments: the command line; a value that is not a whole number, or none, has no follower.
    """
    on_line = _set_on_line(arguments)
    chosen = {*_flat(in_file), *on_line}
    options = _flat(defaults)
    options |= {name: value for name, value in on_line.items() if name in options}
    changed: dict[str, Any] = {}
    for option, depends_on, value, is_number in FOLLOWING:
        if option in chosen or option not in options or not chosen & {*depends_on}:
            continue
        # a wrong value is refused where it is parsed, with its own option; nothing follows it
        if is_number and any(not _is_number(options.get(name)) for name in depends_on):
            continue
        options[option] = changed[option] = value(options)
    return _nested(changed)


def drop_parameters(
    table: Mapping[str, Any], arguments: Sequence[str], path: str = ""
) -> dict[str, Any]:
    """Return nested values without the parameters of a loss or an advantage that the command line replaces.

    The name stays, and so does a table without one: the parser sets the new name, and the values have to
    fit each other until then.
    """
    names = _set_on_line(arguments)
    kept: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            kept[key] = value
            continue
        inside = drop_parameters(value, arguments, f"{path}{key}.")
        name = names.get(f"{path}{key}.name")
        if key in NAMED_TABLES and name is not None and value.get("name", name) != name:
            inside = {field: inside[field] for field in NAMED_TABLES[key] if field in inside}
        kept[key] = inside
    return kept


def list_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the losses and advantages in nested values, nested alike."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            continue
        is_named = key in NAMED_TABLES and "name" in value
        inside = {"name": value["name"]} if is_named else list_names(value)
        if inside:
            found[key] = inside
    return found


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 0)


def _set_on_line(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that the command line sets, with their values: numbers, none or texts."""
    found: dict[str, Any] = {}
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            continue
        if not equals:
            value = arguments[number + 1] if number + 1 < len(arguments) else ""
        read = None if value == "None" else int(value) if value.isdecimal() else value
        found[name.removeprefix("--").replace("-", "_")] = read
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Options:
    found: Options = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in options.items():
        *path, last = name.split(".")
        inside = table
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return table


def unused_options(config: Config) -> dict[str, str]:
    """Return what nothing reads in a configuration: options by dotted path, with reasons."""
    found = dict(config.unused_options())
    if isinstance(config, LearningConfig):
        found = {**unused_by_pipeline(config.pipeline), **found}
    for name in config.__struct_fields__:
        table = getattr(config, name)
        if isinstance(table, Config) and name not in found:
            for path, why in unused_options(table).items():
                # a reason that begins with an option of the table, as `ReadIf` gives it
                is_option = re.split(r"[ .]", why)[0] in table.__struct_fields__
                found[f"{name}.{path}"] = f"{name}.{why}" if is_option else why
    return found


def refuse_unused_options(config: Config, defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first option that was set though nothing reads it.

    Args:
        config: configuration with the values of the command line.
        defaults: nested values of the options that were not set.
    """
    values = msgspec.to_builtins(config, enc_hook=str)
    for path, why in unused_options(config).items():
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
