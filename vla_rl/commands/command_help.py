"""The help of a recipe: `--help` shows its common options, in paragraphs as wide as the terminal,
`--help-all` shows all.
"""

import ast
import contextlib
import functools
import inspect
import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn, TextIO, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from vla_rl.types import Config

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
        "HeldOutConfig": ("init_states",),
    }
)
"""Options that `--help` shows, by the class of their table. It shows all of a recipe's own options,
and none of a table that is not listed here."""


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


def option_registry(recipe: type[Config] | None = None) -> ConstructorRegistry:
    """Return a registry with which tyro makes one option for each field of a configuration, with
    the field's string as help.

    `recipe`: show only the common options of this configuration; None shows every option.
    """
    registry = ConstructorRegistry()

    @registry.struct_rule
    def fields_of(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not (_is_table(info.type) and isinstance(info.default, info.type)):
            return None  # left to tyro's own rules
        config: type[Config] = info.type
        fields = []
        for name, hint in _hints_of(config).items():
            is_shown = recipe is None or _is_common(config, name, recipe)
            kind: Any = hint if is_shown else Annotated[hint, tyro.conf.Suppress]
            default, help_text = getattr(info.default, name), field_docs(config).get(name)
            fields.append(
                StructFieldSpec(name=name, type=kind, default=default, helptext=help_text)
            )
        return StructConstructorSpec(instantiate=config, fields=tuple(fields))

    return registry


def print_help(
    parse: Callable[[ConstructorRegistry, str], Any], recipe: type[Config] | None, description: str
) -> NoReturn:
    """Print the help of a recipe's common options, or of all. Raises: SystemExit.

    Args:
        parse: has tyro print its help and exit, with the options of a registry and a description.
        recipe: the recipe's configuration; None shows every option.
        description: description of the recipe, in paragraphs.
    """
    shown = _Captured(sys.stdout)
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse(option_registry(recipe), _PLACE)
    before, _, after = shown.getvalue().partition(_PLACE)
    print(before + filled(description) + after.rstrip("\n"))
    num_left_out = 0 if recipe is None else _num_options(recipe) - _num_options(recipe, recipe)
    if num_left_out:
        print(f"{num_left_out} more options: {program_name()} {HELP_ALL}")
    raise SystemExit(0)


_PLACE: Final = "DESCRIPTION"
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


def filled(text: str) -> str:
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
def field_docs(config: type[Config]) -> Mapping[str, str]:
    """Return the string under each field of a configuration and of its base classes, each paragraph
    in one line.
    """
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not (issubclass(kind, Config) and kind is not Config):
            continue
        found |= vars(kind).get("FIELD_DOCS", {})
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, SyntaxError):  # a class without a source file
            continue
        assert isinstance(tree, ast.ClassDef)
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
    return found


def _hints_of(config: type[Config]) -> dict[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {name: hints[name] for name in config.__struct_fields__}


def _is_table(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Config)


def _is_common(config: type[Config], name: str, recipe: type[Config]) -> bool:
    if config is not recipe:
        return name in COMMON.get(config.__name__, ())
    hint = _hints_of(config)[name]
    return not _is_table(hint) or hint.__name__ in COMMON


def _num_options(config: type[Config], recipe: type[Config] | None = None) -> int:
    """Count the options of a configuration; with a `recipe`, only the common ones."""
    shown = {
        name: hint
        for name, hint in _hints_of(config).items()
        if recipe is None or _is_common(config, name, recipe)
    }
    return sum(_num_options(hint, recipe) if _is_table(hint) else 1 for hint in shown.values())
