"""Each module has a test file of its name, or `where_tested.toml` names the file that tests it."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from statements import statements_in

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "vla_rl"
LISTED: dict[str, str] = tomllib.loads((TESTS / "where_tested.toml").read_text())

FUNCTION = re.compile(r"^ *(async )?def ", re.MULTILINE)
OURS = re.compile(r"\bvla_rl(?:\.\w+)+")


def modules_with_functions() -> Iterator[Path]:
    """Yield the modules that compute something, relative to the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem not in ("__init__", "__main__") and FUNCTION.search(path.read_text()):
            yield path.relative_to(PACKAGE)


MODULES = list(modules_with_functions())
HELPERS = {path.stem: path for path in TESTS.rglob("*.py") if not path.stem.startswith("test_")}


def namesake(module: Path) -> Path | None:
    """Return the test file of a module's name in its folder, or in the nearest one above it."""
    for folder in module.parents:
        path = folder / f"test_{module.name}"
        # in a folder above, it belongs to the module of that folder, if there is one
        is_of_another = folder != module.parent and folder / module.name in MODULES
        if (TESTS / path).exists() and not is_of_another:
            return path
        if folder.parent == Path():
            break
    return None


def rooms_named_by(test: Path) -> set[str]:
    """Return the rooms that a test file names, in imports or in texts, with its helpers and fixtures.

    Programs that a test starts, and environments by their ids, are in its texts.
    """
    fixtures = (folder / "conftest.py" for folder in test.parents if folder != TESTS)
    left, read, rooms = [test, *(path for path in fixtures if path.exists())], set(), set()
    while left:
        path = left.pop()
        if path in read:
            continue
        read.add(path)
        text = path.read_text()
        rooms |= {name.split(".")[1] for name in OURS.findall(text)}
        for node in statements_in(text):
            if isinstance(node, ast.ImportFrom) and node.module in HELPERS:
                left.append(HELPERS[node.module])
    return rooms


def test_a_module_has_a_test_file_of_its_name_or_an_entry_in_the_list() -> None:
    untested = [
        f"{module}: write tests/{module.parent / f'test_{module.name}'}"
        for module in MODULES
        if not namesake(module) and str(module) not in LISTED
    ]
    assert not untested


def test_an_entry_goes_once_its_module_has_a_test_file_of_its_name() -> None:
    assert not [f"{name}: drop its line" for name in LISTED if namesake(Path(name))]


def test_the_list_has_modules_that_are_there_in_order() -> None:
    assert not LISTED.keys() - {str(module) for module in MODULES}
    assert list(LISTED) == sorted(LISTED)


def test_each_test_of_the_list_is_there_and_names_the_room_of_its_modules() -> None:
    rooms = {name: rooms_named_by(TESTS / name) for name in set(LISTED.values())}
    wrong = [
        f"{test} names nothing of the room of {module}"
        for module, test in LISTED.items()
        if Path(module).parts[0] not in rooms[test]
    ]
    assert not wrong
