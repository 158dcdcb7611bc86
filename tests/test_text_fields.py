"""What is no text never becomes a text by `str()`: nobody wrote Python's spelling of it.

`str(row["task"])` makes the instruction `None` of a null. Fields of files, messages and environments
go through `require_text`, a msgspec struct or a check of their type; every other `str()` of a field
in the package is listed here, with the reason why it is no such case.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent / "vla_rl"

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
        "evaluation/contact_sheets.py",
        "kwargs.get('kind') or draw_world(number, kwargs['split']).kind",
    ): "an option that the environment has checked",
    ("envs/text/tools.py", "schema.get('type', 'any')"): "a schema that msgspec made",
    ("models/prismatic/conventions.py", "fields['dtype']"): "a type of torch, checked before",
    ("models/prismatic/conventions.py", "fields['adapter']"): "a path, checked before",
    ("evaluation/records.py", "info.get('last_reply', '')"): "an agent's own, only hashed",
    ("run/recording.py", "env.kwargs.get('env_id', env.id)"): "an option, checked before",
}


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
