"""docs/data.md does what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
from made_datasets import made_episode

from vla_rl.datasets import LeRobotWriter, read_lerobot
from vla_rl.rollout import embodied_agent

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What stands after all snippets ran."""
    names: dict[str, Any] = {}
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
    ):
        exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    return names


def test_a_data_set_is_looked_at(
    page: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LeRobotWriter(tmp_path).add(made_episode("a", 5))
    page["look_at"](tmp_path)
    assert "a push the plate 5 True\n(12, 12, 3) [" in capsys.readouterr().out


def test_a_data_set_is_copied(page: dict[str, Any], tmp_path: Path) -> None:
    LeRobotWriter(tmp_path / "one").add(made_episode("a", 5)).add(made_episode("b", 2))
    page["with_images"](tmp_path / "one", tmp_path / "two")
    assert [episode.name for episode in read_lerobot(tmp_path / "two")] == ["a", "b"]


def test_a_recording_agent_is_made(page: dict[str, Any], tmp_path: Path) -> None:
    assert callable(page["recording"](tmp_path / "new", embodied_agent))


def test_every_option_of_the_page_exists() -> None:
    from vla_rl.recipes.sft_libero import SftLiberoConfig

    named = set(re.findall(r"`--([a-z-]+)", PAGE.read_text())) - {
        "from",
        "record-to",
        "run",
        "data",
    }
    assert {name.replace("-", "_") for name in named} - {"policy"} <= set(
        SftLiberoConfig.__struct_fields__
    )
