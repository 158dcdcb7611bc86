"""Tasks are found by id or path; the page's own example runs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vla_rl.envs.text  # noqa: F401 - registers its tasks
from vla_rl.envs.text.task import find_text_task, make_text_task, text_task_ids
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec


def test_an_id_and_the_path_of_its_class_give_the_same_class() -> None:
    for task_id in text_task_ids():
        found = find_text_task(task_id)
        assert find_text_task(f"{found.__module__}:{found.__name__}") is found


@pytest.mark.parametrize(
    ("task_id", "said"),
    [
        ("text/arithmetik", "is unknown; did you mean 'text/arithmetic'"),
        ("no_assets:Task", "module 'no_assets' cannot be found; is it on the path?"),
        (":Task", "':Task' is not the path of a TextTask, expected 'module:name'"),
        (
            "vla_rl.envs.text.task:TextTasc",
            r"has no TextTask 'TextTasc'; did you mean 'TextTask'\?",
        ),
        ("vla_rl.types:EnvSpec", "has no TextTask 'EnvSpec'"),
    ],
)
def test_what_is_no_text_environment_is_named_with_the_nearest(task_id: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_text_task(task_id)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"colour": "red"}, "argument of .* 'colour' is unknown"),
        ({"num_digits": "x"}, "'num_digits' of .* is 'x'"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_text_task(EnvSpec(id="text/arithmetic", kwargs=kwargs))


PAGE = Path(__file__).parents[3] / "docs" / "text_environments.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_task_with_a_tool_has_no_more_than_thirty_lines_of_code_and_runs(folder: Path) -> None:
    code = [line for line in BLOCKS["rivers.py"].splitlines() if line.strip()]
    assert len(code) <= 30, len(code)
    lines = run(folder, "play_rivers.py")
    assert re.fullmatch(r"Which river flows through \w+\? \['look_up'\]", lines[0])
    assert lines[1] == "Mur"
    assert lines[2].split()[1] in ("True", "False")


def test_the_sandbox_answers_as_shown(folder: Path) -> None:
    assert run(folder, "sandboxed.py") == [
        "TypeError: math.factorial() takes exactly one argument (0 given)",
        "144",
        "timed_out - it took longer than 0.5 s and was stopped",
    ]


def test_what_is_missing_can_be_asked_as_shown(folder: Path) -> None:
    assert run(folder, "isolated.py") == ["left out by configuration"]


def test_a_data_set_becomes_starts(folder: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = "from starts import starts\nprint([start.options for start in starts('train.jsonl')])"
    assert run(folder, "-c", program) == ["[{'row': 0}, {'row': 1}, {'row': 2}]"]


def test_every_environment_of_the_table_is_registered_and_takes_what_it_says() -> None:
    import inspect

    from vla_rl.envs.text.task import find_text_task

    rows = re.findall(r"^\| `(text/\w+)` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [
        "text/arithmetic",
        "text/arithmetic_pair",
        "text/question",
        "text/search",
        "text/square",
    ]
    for name, arguments in rows:
        known = inspect.signature(find_text_task(name)).parameters
        assert set(re.findall(r"`(\w+)`", arguments)) <= set(known), name
