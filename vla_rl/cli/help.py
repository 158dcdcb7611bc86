"""The help of a recipe: `--help` shows its common options, in paragraphs as wide as the terminal,
`--help-all` shows all.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Final,
    NoReturn,
    TextIO,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from vla_rl.cli.option_rules import unused_options
from vla_rl.types import Config
from vla_rl.types.config import describe_range

HELP_ALL: Final = "--help-all"

COMMON: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "RunConfig": (
            "updates",
            "seed",
            "device",
            "checkpoint_every",
            "record_to",
            "wandb_project",
        ),
        "RewardConfig": ("function",),
        "AdvantageConfig": ("name",),
        "SchedulerConfig": ("groups_per_update", "max_staleness"),
        "EngineConfig": ("kind",),
        "LearnerConfig": ("optimizer", "loss"),
        "ImitationConfig": ("optimizer",),
        "OptimizerConfig": ("lr",),
        "PolicyLossConfig": ("name",),
        "SimulatorConfig": ("num_envs", "envs_per_process"),
        "TextPoolConfig": ("num_envs",),
        "HeldOutConfig": ("init_states", "by_mean", "every", "simulators", "stop_after"),
        "HeldOutStarts": ("init_states", "by_mean", "every", "simulators", "stop_after"),
        "HeldOutScenesConfig": ("scenes", "by_mean", "every", "simulators", "stop_after"),
        "HeldOutReaches": ("init_states", "every", "simulators", "stop_after"),
        "HeldOutSeeds": ("starts", "every", "simulators", "stop_after"),
    }
)
"""Options that `--help` shows, by the class of their table. It shows all of a recipe's own options,
and none of a table that is not listed here. Neither `--help` nor `--help-all` shows what nothing
reads (`unused_options`)."""

PACKAGE: Final = Path(__file__).parents[1]


def program_name() -> str:
    """Return how this program was started: `python -m vla_rl.recipes.srpo_libero`,
    `vla-rl srpo_libero`, or a script.
    """
    if sys.argv[0].startswith("vla-rl "):
        return sys.argv[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name == "__main__":
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def option_registry(
    is_shown: Callable[[Config, str], bool] = lambda table, name: True,
) -> ConstructorRegistry:
    """Return a registry with which tyro makes one option for each field of a configuration, with
    the field's string as help.

    `is_shown` returns whether the help shows a field of a table.
    """
    registry = ConstructorRegistry()

    @registry.struct_rule
    def fields_of(info: StructTypeInfo) -> StructConstructorSpec | None:
        kept = info.type if isinstance(info.type, type) else object
        if not isinstance(info.default, kept):
            return None  # left to tyro's own rules
        if dataclasses.is_dataclass(kept):
            return _launch_options(kept, info.default)
        if not _is_table(kept):
            return None
        config: type[Config] = kept
        fields = []
        for name, hint in _field_hints(config).items():
            default, help_text = getattr(info.default, name), field_docs(config).get(name)
            kind: Any = hint
            if not is_shown(info.default, name):
                kind = Annotated[hint, tyro.conf.Suppress]
            # a file that ships lies deep in site-packages: its name says more than its path
            elif isinstance(default, str) and Path(default).is_relative_to(PACKAGE):
                shipped = f"(default: {Path(default).name}, which ships with the package)"
                kind = Annotated[hint, tyro.conf.arg(help_behavior_hint=shipped)]
            elif expected := describe_range(hint):
                show = functools.partial("({}; default: {})".format, expected)
                kind = Annotated[hint, tyro.conf.arg(help_behavior_hint=show)]
            fields.append(
                StructFieldSpec(name=name, type=kind, default=default, helptext=help_text)
            )
        return StructConstructorSpec(instantiate=config, fields=tuple(fields))

    return registry


def _launch_options(kind: type, default: Any) -> StructConstructorSpec:
    """Return the options of a dataclass, whose source tyro would read again at each parse."""
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    fields = (
        StructFieldSpec(
            name=field.name,
            type=hints[field.name],
            default=getattr(default, field.name),
            helptext=docs.get(field.name),
        )
        for field in dataclasses.fields(kind)
        if field.init
    )
    return StructConstructorSpec(instantiate=kind, fields=tuple(fields))


def print_help(
    parse: Callable[[ConstructorRegistry, str], Any],
    default: Config,
    given: Config,
    description: str,
    *,
    wants_all: bool,
) -> NoReturn:
    """Print the help of the options that the recipe reads: the common ones, or all. Raises:
    SystemExit.

    Args:
        parse: has tyro print its help and exit, with the options of a registry and a description.
        default: the configuration whose values the help shows as defaults.
        given: the same with the values of the command line; they decide what is read.
        description: description of the recipe, in paragraphs.
        wants_all: show every option that is read, not only the common ones.
    """
    unused = unused_options(given)
    # by identity: two tables of one configuration may be equal
    hidden = {id(table): names for table, names in _selected_tables(default, unused)}

    def is_read(table: Config, name: str) -> bool:
        return name not in hidden.get(id(table), ())

    def is_common(table: Config, name: str) -> bool:
        return is_read(table, name) and _is_common(type(table), name, type(default))

    is_shown = is_read if wants_all else is_common
    # tyro prints and exits by itself, and joins the paragraphs of a description into one line: what
    # it prints is captured, and the description put in as it is
    shown = _Captured(sys.stdout)
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse(option_registry(is_shown), _DESCRIPTION)
    before, _, after = shown.getvalue().partition(_DESCRIPTION)
    print(before + fill_paragraphs(description) + after.rstrip("\n"))
    num_more = num_options(default, is_read) - num_options(default, is_shown)
    if num_more:
        print(f"{num_more} more options: {program_name()} {HELP_ALL}")
    if wants_all and unused:
        print(_list_unused_options(unused))
    raise SystemExit(0)


def _selected_tables(
    config: Config, paths: Collection[str], prefix: str = ""
) -> Iterator[tuple[Config, set[str]]]:
    """Yield each table of a configuration with the names of those of its options that are among
    `paths`.
    """
    fields = config.__struct_fields__
    yield config, {name for name in fields if f"{prefix}{name}" in paths}
    for name in fields:
        if isinstance(table := getattr(config, name), Config):
            yield from _selected_tables(table, paths, f"{prefix}{name}.")


def _list_unused_options(unused: Mapping[str, str]) -> str:
    """List the options that other values would make readable, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for path, why in unused.items():
        by_reason.setdefault(why, []).append(path)
    rows = [f"{why}: {', '.join(paths)}" for why, paths in by_reason.items()]
    return fill_paragraphs("Not shown, because nothing would read them:") + "".join(
        f"\n  {row}" for row in rows
    )


_DESCRIPTION: Final = "DESCRIPTION"
"""Placeholder for the description in the help, because tyro would join its paragraphs into one
line."""


class _Captured(io.StringIO):
    """Captures standard output while tyro prints.

    It reports the real stream's abilities, so a terminal gets colours.
    """

    def __init__(self, true_one: TextIO) -> None:
        super().__init__()
        self._true_one = true_one

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._true_one.encoding

    def isatty(self) -> bool:
        return self._true_one.isatty()


def fill_paragraphs(text: str) -> str:
    """Fill the paragraphs of a docstring to the terminal's width.

    Indented ones (commands, drawings) stay as they are.
    """
    width = max(shutil.get_terminal_size().columns, 40)
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ") or "\n " in paragraph
        else textwrap.fill(paragraph, width)
        for paragraph in paragraphs
    )


@functools.cache
def field_docs(config: type) -> Mapping[str, str]:
    """Return the help of each field of a configuration, or of a dataclass.

    It is the description that its type carries (`Annotated[..., msgspec.Meta(description=...)]`),
    for options that several configurations share, and then the string under the field, here or in a
    base class, each paragraph in one line.
    """
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if kind is Config or not (issubclass(kind, Config) or dataclasses.is_dataclass(kind)):
            continue
        # generated classes have no source to read, so they carry the help of their fields
        found |= {**vars(kind).get("FIELD_DOCS", {}), **_join_docs(vars(kind).get("PARTS", {}))}
        tree = _class_tree(kind)
        if tree is None:
            continue
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            if not (
                isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ):
                continue
            if (
                isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                paragraphs = inspect.cleandoc(below.value.value).split("\n\n")
                found[statement.target.id] = "\n\n".join(
                    " ".join(paragraph.split()) for paragraph in paragraphs
                )
    for name, hint in get_type_hints(config, include_extras=True).items():
        if shared := _get_description(hint):
            found[name] = f"{shared} {found.get(name, '')}".rstrip()
    return found


def _join_docs(parts: Mapping[str, type[Config]]) -> Mapping[str, str]:
    """Return the help of fields that several configurations have, with the names of those that give
    a field this meaning; a meaning that most of them share goes without names."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, part in parts.items():
        hints = get_type_hints(part, include_extras=True)
        for field in part.__struct_fields__:
            expected, text = describe_range(hints[field]), field_docs(part)[field]
            text = f"{text.removesuffix('.')} ({expected})." if expected else text
            meanings.setdefault(field, {}).setdefault(text, []).append(name)
    return {
        field: " ".join(
            # a list of most names would hide what the option does
            text if len(names) > 2 else f"{', '.join(names)}: {text[0].lower()}{text[1:]}"
            for text, names in by_text.items()
        )
        for field, by_text in meanings.items()
    }


def _get_description(hint: Any) -> str:
    """Return the description that a type carries, or that of the type beside None."""
    for each in getattr(hint, "__metadata__", ()):
        if isinstance(each, msgspec.Meta) and each.description:
            return each.description
    is_union = get_origin(hint) in (Union, types.UnionType)
    return next(filter(None, map(_get_description, get_args(hint))), "") if is_union else ""


def _class_tree(kind: type) -> ast.ClassDef | None:
    """Return the syntax tree of a class; None if its source is not known."""
    try:
        whole = inspect.getsource(sys.modules[kind.__module__])
        if kind.__qualname__ in (classes := _class_nodes(whole)):
            return classes[kind.__qualname__]
    except (KeyError, OSError, TypeError, SyntaxError):  # a module without a source file
        pass
    # a class in a function, such as one of a user's notebook, is not at the top of its module
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError):  # a class without a source file
        return None
    assert isinstance(tree, ast.ClassDef)
    return tree


@functools.cache
def _class_nodes(source: str) -> Mapping[str, ast.ClassDef]:
    """Return the classes of a module: `inspect.getsource` would parse the module for each of them."""
    return {each.name: each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)}


@functools.cache
def _field_hints(config: type[Config]) -> Mapping[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {name: hints[name] for name in config.__struct_fields__}


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Config)


def _is_common(config: type[Config], name: str, recipe: type[Config]) -> bool:
    if config is not recipe:
        return name in COMMON.get(config.__name__, ())
    hint = _field_hints(config)[name]
    return not _is_table(hint) or hint.__name__ in COMMON


def num_options(config: Config, is_shown: Callable[[Config, str], bool]) -> int:
    """Count the options of a configuration and its tables that are shown."""
    values = [getattr(config, name) for name in config.__struct_fields__ if is_shown(config, name)]
    return sum(num_options(v, is_shown) if isinstance(v, Config) else 1 for v in values)
