"""What docs/text_environments.md shows runs exactly as it is shown."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_task_with_a_tool_has_no_more_than_thirty_lines_of_code_and_plays(folder: Path) -> None:
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
