"""Every option of a recipe is explained by a page, or set by a recipe."""

import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import vla_rl
from vla_rl.types import Config

ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = Path(vla_rl.__file__).parent / "recipes"
PAGES: Final = "\n".join(
    page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
)


def tables() -> Iterator[Config]:
    """Yield every recipe's configuration and its tables, with the recipe's values."""
    for path in sorted(RECIPES.glob("*.py")):
        module = importlib.import_module(f"vla_rl.recipes.{path.stem}")
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_own and issubclass(kind, Config):
                fields = msgspec.structs.fields(kind)
                if not any(field.required for field in fields):
                    yield from nested(kind())


def nested(table: Config) -> Iterator[Config]:
    yield table
    for name in table.__struct_fields__:
        if isinstance(inner := getattr(table, name), Config):
            yield from nested(inner)


def keys(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        if isinstance(value, dict):
            yield from keys(value)


def is_explained(option: str) -> bool:
    """Whether a page has the option: on a command line, in a file or in code."""
    kebab = option.replace("_", "-")
    if re.search(rf"--(?:no-)?(?:[\w-]+\.)*{kebab}(?![\w-])|`[^`\n]*\b{option}\b[^`\n]*`", PAGES):
        return True
    return re.search(rf"\b{option}\b" if "_" in option else rf"\b{option} ?= ?", PAGES) is not None


def test_every_option_is_explained_by_a_page_or_set_by_a_recipe() -> None:
    shipped = {
        key
        for path in (RECIPES / "configs").glob("*.toml")
        for key in keys(tomllib.loads(path.read_text()))
    }
    missing, found = set[str](), set[str]()
    for table in tables():
        for field in msgspec.structs.fields(type(table)):
            name, value = field.name, getattr(table, field.name)
            option = f"{type(table).__name__}.{name}"
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            is_set = not isinstance(value, Config) and value != default
            if is_set or name in shipped or is_explained(name):
                found.add(option)
            else:
                missing.add(option)
    assert sorted(missing - found) == []
    assert len(found) > 250


def test_every_option_in_a_table_of_options_exists() -> None:
    known = {name for table in tables() for name in table.__struct_fields__}
    known |= {"from"}  # of the supervised recipes, where Python takes the word
    named, in_table = set[str](), False
    for line in PAGES.splitlines():
        is_head = line.startswith("| option")
        in_table = is_head or (in_table and line.startswith("|"))
        if in_table and not is_head:
            first = line.split("|")[1]
            named |= {each.lstrip("-").split()[0] for each in re.findall(r"`([^`]+)`", first)}
    assert len(named) > 80
    last_parts = {name: name.split(".")[-1].replace("-", "_") for name in named}
    assert sorted(name for name, last in last_parts.items() if last not in known) == []
