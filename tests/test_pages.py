"""docs/environments.md, docs/graph.md and docs/data.md do what they say: their blocks are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.support.made_datasets import made_episode
from vla_rl.datasets import LeRobotWriter, read_lerobot
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.rollout import embodied_agent

DOCS = Path(__file__).parents[1] / "docs"
ENVIRONMENTS = (DOCS / "environments.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", ENVIRONMENTS, re.DOTALL))
"""Blocks of environments.md, by the name of the file in their first lines."""

EXPECTED = {
    "play_here.py": "success: True",
    "play_there.py": "[0. 0. 0. 0. 0. 0. 0. 0.] False {",
    "play_pool.py": "'simulation/leases': 6.0",
    "play_packed.py": "8 episodes in 2 processes",
    "train_elsewhere.py": "(2, 4) [1. 1.]",
    "wrapped.py": "(9.8, 9.8) (4,)",
    "play_mine.py": "True after ",
}


def test_every_block_about_environments_is_known_here() -> None:
    assert ENVIRONMENTS.count("```python") == len(PROGRAMS)
    assert set(PROGRAMS) == {*EXPECTED, "my_envs.py"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_block_about_environments_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    for file_name, code in PROGRAMS.items():
        (tmp_path / file_name).write_text(code)
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout


def test_the_blocks_about_graphs_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "graph.md"
    blocks = re.findall(
        r"^```(python|toml)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert [kind for kind, _ in blocks].count("python") == 6
    names: dict[str, object] = {"__name__": "graph_page"}
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / "pipeline.toml").write_text(text)
        else:
            exec(compile(text, str(page), "exec"), names)
    printed = capsys.readouterr().out
    assert "└── rollout: update -> groups*" in printed
    assert re.search(r"update 2: [\d.]+ (ms|s) = ", printed)
    assert (tmp_path / "live.json").read_text() == (tmp_path / "trace.json").read_text()


def test_the_functions_about_data_sets_look_copy_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    page: dict[str, Any] = {}
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), start=1):
        exec(compile(snippet, f"data.md snippet {number}", "exec"), page)

    LeRobotWriter(tmp_path / "one").add(made_episode("a", 5)).add(made_episode("b", 2))
    page["look_at"](tmp_path / "one")
    assert (
        "a push the plate 5 True\nb push the plate 2 True\n(12, 12, 3) [" in capsys.readouterr().out
    )
    page["with_images"](tmp_path / "one", tmp_path / "two")
    assert [episode.name for episode in read_lerobot(tmp_path / "two")] == ["a", "b"]
    assert callable(page["recording"](tmp_path / "new", embodied_agent))


def test_every_option_of_the_page_about_data_sets_exists() -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`--([a-z-]+)", text)) - {"from", "record-to", "run", "data"}
    assert {name.replace("-", "_") for name in named} - {"policy"} <= set(
        SftLiberoConfig.__struct_fields__
    )
