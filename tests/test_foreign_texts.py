"""What others wrote is read with care: patterns take time in proportion to a text, nothing else becomes one.

A reply can freeze a run by a pattern that backtracks, because matching holds the interpreter's lock.
Every module of the package that uses `re` is in one of the two tables here.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from durations import assert_grows_in_proportion

from vla_rl.envs.text import arithmetic, sums
from vla_rl.scoring import scorers
from vla_rl.util import arrays

PACKAGE: Final = Path(__file__).parent.parent / "vla_rl"

FOREIGN: Final[dict[str, tuple[tuple[str, Callable[[str], Any]], ...]]] = {
    "scoring/scorers.py": (
        (scorers._HASHES.pattern, scorers._HASHES.findall),
        (scorers._LABEL.pattern, scorers._LABEL.findall),
        (scorers._FENCE.pattern, scorers._FENCE.fullmatch),
        (scorers._CLOSING.pattern, scorers._CLOSING.fullmatch),
        (r"\b(a|an|the)\b", scorers.normalize_answer),
    ),
    "util/arrays.py": ((arrays._CODE.pattern, arrays._CODE.fullmatch),),
    "envs/text/arithmetic.py": (
        (arithmetic._OPERATION.pattern, arithmetic._OPERATION.fullmatch),
        (arithmetic._NUMBER.pattern, arithmetic._NUMBER.fullmatch),
    ),
    "envs/text/sums.py": (
        (sums._NUMBER.pattern, sums._NUMBER.findall),
        (sums._SUM.pattern, sums._SUM.search),
    ),
}
"""Modules that read text of models, tools, pages and clients: each pattern, and how it is used."""

OURS: Final = {
    "cluster/layout.py": "a host file's line",
    "cluster/host_file.py": "names in a host file, and an error of msgspec",
    "cli/why.py": "what a run of ours answers",
    "cli/arguments.py": "the words of an option",
    "cli/option_rules.py": "a reason of an option that is not read",
    "cli/command_line.py": "the path in an error of msgspec",
    "datasets/hdf5.py": "names of files",
    "datasets/rlds.py": "names of files",
    "datasets/lerobot/layout.py": "paths in a data set's description",
    "datasets/lerobot/video_files.py": "what ffmpeg says of a video",
    "envs/driving/scores/leaderboard_files.py": "messages of the leaderboard",
    "envs/libero/building.py": "scenes that the installed LIBERO built",
    "envs/libero/task_files.py": "goal files of a suite",
    "envs/libero/tasks.py": "goal files of the installed LIBERO",
    "envs/libero/packages.py": "names of files",
    "envs/text/tools.py": "docstrings of tools",
    "evaluation/contact_sheets.py": "names of files",
    "evaluation/suites.py": "an option",
    "util/values.py": "a name of a run",
    "util/installing.py": "requirements of this package",
    "learner/checkpoint/files.py": "names of files",
    "learner/checkpoint/folders.py": "names of folders",
    "models/openvla_oft/parts.py": "names of tensors",
    "models/weight_files.py": "names of files",
    "models/prismatic/folder.py": "a path",
    "models/tensor_reading.py": "an id, a digest",
    "models/prismatic/adapters.py": "names of tensors",
    "reporting/metrics.py": "names of metrics",
    "reporting/run_directory.py": "names of files",
    "reporting/videos.py": "names of tasks",
}
"""Modules whose patterns read short texts of a user, a file or this package."""

READERS: Final = ("datasets", "endpoint", "envs", "evaluation/parity", "models", "scoring")
"""Rooms whose f-strings count as well, because they read what others wrote."""

LISTED: Final = {
    (
        "datasets/lerobot/layout.py",
        "about.get('video.pix_fmt', '')",
    ): "only compared with known formats",
    ("datasets/lerobot/tables.py", "row['task_index']"): "a number, in the label of an error",
    ("endpoint/api.py", "body['type']"): "an event that this package makes",
    ("endpoint/verifiers/rollouts.py", "state.get('stop_condition') or ''"): "words of verifiers",
    ("envs/bench2drive/policy_host.py", "hello['route']"): "a message of this package",
    ("envs/bench2drive/carla_side/vla_rl_agent.py", "config['host']"): "written by this package",
    ("envs/bench2drive/carla_side/vla_rl_agent.py", "config['port']"): "written by this package",
    (
        "evaluation/drive_sheets.py",
        "kwargs.get('kind') or draw_world(number, kwargs['split']).kind",
    ): "an option that the environment has checked",
    ("envs/text/tools.py", "schema.get('type', 'any')"): "a schema that msgspec made",
    ("models/prismatic/conventions.py", "fields['dtype']"): "a type of torch, checked before",
    ("models/prismatic/conventions.py", "fields['adapter']"): "a path, checked before",
    ("evaluation/records.py", "info.get('last_reply', '')"): "an agent's own, only hashed",
    ("run/recording.py", "env.kwargs.get('env_id', env.id)"): "an option, checked before",
}


def modules_with_patterns() -> set[str]:
    """Return the modules of the package that import `re` or `regex`."""
    imports = re.compile(r"^\s*(?:import|from) (?:re|regex|re2)\b", re.MULTILINE)
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if imports.search(path.read_text())
    }


def patterns_in(module: str) -> list[str]:
    """Return the patterns that a module gives to functions of `re`, in order."""
    tree = ast.parse((PACKAGE / module).read_text())
    return [
        ast.literal_eval(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
    ]


def pieces_of(tree: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield a shortest text and the characters of each element of a parsed pattern, in order."""
    for kind, value in tree:
        name = str(kind)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, _, inner = value
            pieces = list(pieces_of(inner))
            text = "".join(text for text, _ in pieces) * max(1, least)
            yield text if least else "", {char for _, chars in pieces for char in chars}
            yield text, set()
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            yield from pieces_of(value[-1] if name == "SUBPATTERN" else value)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from pieces_of(branch)
        else:
            chars = set(characters_of(name, value))
            yield (min(chars) if chars else ""), chars


def characters_of(name: str, value: Any) -> Iterator[str]:
    """Yield some characters that an element of a pattern takes."""
    if name == "LITERAL":
        yield chr(value)
    elif name in ("NOT_LITERAL", "ANY"):
        yield "x"
    elif name == "IN":
        for kind, inner in value:
            if str(kind) == "NEGATE":
                yield "x"
            elif str(kind) == "RANGE":
                yield chr(inner[0])
            elif str(kind) == "CATEGORY":
                yield {"DIGIT": "1", "SPACE": " ", "WORD": "a"}.get(str(inner).split("_")[-1], "x")
            else:
                yield from characters_of(str(kind), inner)


def attacks(pattern: str) -> list[tuple[str, str, str]]:
    """Return texts that a pattern may backtrack on: a beginning, what is repeated, and an end."""
    pieces = list(pieces_of(re._parser.parse(pattern)))  # type: ignore[attr-defined]
    begins = {""}
    for number in range(len(pieces) + 1):
        begins.add("".join(text for text, _ in pieces[:number]))
    repeated = {char for _, chars in pieces for char in chars} | begins - {""}
    return [
        (begin, piece, end)
        for begin in sorted(begins)
        for piece in sorted(repeated)
        for end in ("", "x", "\n")
    ]


def assert_linear(pattern: str, use: Callable[[str], Any]) -> None:
    """Fail if any attack on a pattern takes more than time in proportion to the text."""
    for begin, piece, end in attacks(pattern):
        assert_grows_in_proportion(
            lambda size, parts=(begin, piece, end): use(  # type: ignore[misc]
                parts[0] + parts[1] * (size // len(parts[1])) + parts[2]
            ),
            most_characters=1 << 15,
        )


def test_every_module_with_patterns_is_listed() -> None:
    assert modules_with_patterns() - OURS.keys() == FOREIGN.keys()


@pytest.mark.parametrize("module", FOREIGN)
def test_every_pattern_that_reads_foreign_text_is_listed(module: str) -> None:
    assert sorted(patterns_in(module)) == sorted(pattern for pattern, _ in FOREIGN[module])


@pytest.mark.parametrize(
    ("pattern", "use"),
    [each for module in FOREIGN.values() for each in module],
    ids=[pattern for module in FOREIGN.values() for pattern, _ in module],
)
def test_the_work_of_a_pattern_grows_in_proportion_to_the_text(
    pattern: str, use: Callable[[str], Any]
) -> None:
    assert_linear(pattern, use)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        ("(?s)<answer>(.*?)</answer>", "findall"),
        (r"([^`]*)(`{3,})[ \t]*[.,;:]?[ \t]*", "fullmatch"),
        (r"\s*\d+", "search"),
    ],
)
def test_a_pattern_that_backtracks_is_found(pattern: str, method: str) -> None:
    with pytest.raises(AssertionError, match="of CPU time"):
        assert_linear(pattern, getattr(re.compile(pattern), method))


def is_field(node: ast.expr) -> bool:
    """Return whether an expression looks up a field by name, with `[...]` or `.get(...)`."""
    if isinstance(node, ast.BoolOp):
        return any(map(is_field, node.values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        looked_up = node.args[:1] if node.func.attr == "get" else []
    else:
        looked_up = [node.slice] if isinstance(node, ast.Subscript) else []
    return any(
        (isinstance(key, ast.Constant) and isinstance(key.value, str))
        or (isinstance(key, ast.Name | ast.Attribute) and "field" in ast.unparse(key))
        for key in looked_up
    )


def is_looked_up_by_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name | ast.Attribute)


def spelled_fields(source: str, *, with_f_strings: bool = True) -> Iterator[str]:
    """Yield the fields that a module turns into text by `str()` or an f-string, outside of errors."""
    tree = ast.parse(source)
    in_errors = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in in_errors:
            continue
        if with_f_strings and isinstance(node, ast.FormattedValue) and is_field(node.value):
            yield ast.unparse(node.value)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "str"
            and node.args
            and (is_field(node.args[0]) or is_looked_up_by_variable(node.args[0]))
        ):
            yield ast.unparse(node.args[0])


def test_no_field_becomes_a_text_by_its_python_spelling() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE)
        fields = spelled_fields(path.read_text(), with_f_strings=str(module).startswith(READERS))
        found |= {(str(module), field) for field in fields}
    assert found - LISTED.keys() == set()


def test_a_reader_without_a_check_is_found() -> None:
    source = """
def read(row, name):
    if not row["a"]:
        raise ValueError(f"{row['a']} is nothing")
    return str(row["task"]), f"{row.get('title') or ''}", str(row[name]), str(row[0])
"""
    assert sorted(spelled_fields(source)) == ["row.get('title') or ''", "row['task']", "row[name]"]


def test_the_home_of_an_unknown_user_ends_no_command() -> None:
    # pathlib raises RuntimeError for `~nobody/x`; os.path leaves it as it is, and no folder has that name
    assert [path for path in PACKAGE.rglob("*.py") if ".expanduser()" in path.read_text()] == []
