"""Nothing depends on where a checkout lies, on its name, or on the user who runs it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for folder in ("vla_rl", "tests", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
OUR_PATHS = re.compile(r"/vla_rl(?![-\w.])")
AFTER_A_PATH_OPTION = re.compile(r"--(?:resume|config|run-root|policy|python|no-deps|target|r) $")
"""The end of a text whose next word is a path that the reader is to paste into a shell."""

LOOK_FOR_OUR_NAME = {
    # `vla_rl/requirements` is in the package, whose own folder always has this name
    "tests/engines/vllm/test_adapter.py": 1,
}
QUOTED_BEFORE = {
    # the values as the user gave them, in a sentence
    ("vla_rl/cli/command_line.py", "known.config"),
    ("vla_rl/cli/command_line.py", "known.resume"),
    # a pin of a requirements file
    ("vla_rl/envs/libero/packages.py", "next("),
    ("vla_rl/engines/vllm/adapter.py", "DISTRIBUTIONS[build[0]]"),
    # quoted where it is made
    ("vla_rl/actors/processes/fork_servers.py", "_find_source()"),
}
RIGHTS_OF_ROOT = ("tmpfs(", "network_namespaces(", "os.setresuid(")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in FILES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def comparisons_with_our_name(tree: ast.Module) -> list[int]:
    """Lines that compare or match with a text that holds our name as a folder of a path."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("startswith", "endswith", "split", "partition", "rpartition", "find"):
                asked = node.args
            elif name in ("compile", "search", "match", "fullmatch", "findall", "sub"):
                asked = node.args[:1]
            asked = asked + [each.value for each in node.keywords if each.arg == "match"]
        texts = [
            part.value
            for each in asked
            for part in ast.walk(each)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if any(OUR_PATHS.search(text) and text.startswith(("/", "for CPUs")) for text in texts):
            found.append(node.lineno)
    return found


def test_a_path_is_told_by_the_folder_of_the_package_not_by_its_name() -> None:
    found = {path: comparisons_with_our_name(tree) for path, tree in trees()}
    assert {path: len(lines) for path, lines in found.items() if lines} == LOOK_FOR_OUR_NAME, found


def test_a_path_in_a_command_to_paste_is_quoted_for_the_shell() -> None:
    unquoted, quoted = set(), 0
    for path, tree in trees():
        if not path.startswith("vla_rl/"):
            continue
        for text in ast.walk(tree):
            if not isinstance(text, ast.JoinedStr):
                continue
            for before, value in zip(text.values, text.values[1:], strict=False):
                if (
                    isinstance(value, ast.FormattedValue)
                    and isinstance(before, ast.Constant)
                    and AFTER_A_PATH_OPTION.search(str(before.value))
                ):
                    made = ast.unparse(value.value)
                    if made.startswith("shlex."):
                        quoted += 1
                    elif not any(path == p and made.startswith(m) for p, m in QUOTED_BEFORE):
                        unquoted.add((path, made))
    assert unquoted == set()
    assert quoted >= 3


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if path.name.startswith("test_")
        and any(right in path.read_text() for right in RIGHTS_OF_ROOT)
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_takes_the_rights_of_root_is_marked(path: Path) -> None:
    assert "needs_root" in path.read_text()
