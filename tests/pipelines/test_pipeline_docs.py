"""docs/pipelines says what is true: each page draws its pipeline as it is, and what it shows to
write works.
"""

import re
from pathlib import Path

import msgspec
import pytest

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.pipelines.nodes.rewards import GroupReward, RewardConfig
from vla_rl.pipelines.registry import PIPELINES, with_pipeline
from vla_rl.recipes.train_toy import TrainToyConfig, policy_of, starts_of
from vla_rl.run.train import TrainingRun

PAGES = Path(__file__).parents[2] / "docs" / "pipelines"


def config_of(pipeline: str) -> TrainToyConfig:
    toy = msgspec.structs.replace(TrainToyConfig(), embedding=EmbeddingConfig(encoder="state"))
    return with_pipeline(toy, pipeline)


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_every_pipeline_has_a_page_with_the_drawing_of_its_graph(pipeline: str) -> None:
    config = config_of(pipeline)
    graph = TrainingRun(config, starts_of(config), policy_of(config)).graph
    (drawing,) = re.findall(
        r"```mermaid\n(.*?)```", (PAGES / f"{pipeline}.md").read_text(), re.DOTALL
    )
    assert drawing.strip() == graph.mermaid().strip()
    assert f"({pipeline}.md)" in (PAGES / "README.md").read_text()


def test_the_reward_and_the_pipeline_that_the_page_shows_can_be_named(import_folder: Path) -> None:
    blocks = re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (PAGES / "README.md").read_text(), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["my_rewards.py", "my_pipelines.py"]
    for name, text in blocks:
        (import_folder / name).write_text(text)
    GroupReward(RewardConfig(function="my_rewards:short", manager="my_rewards:best_of_group"))
    config = config_of("my_pipelines:watched")
    graph = TrainingRun(config, starts_of(config), policy_of(config)).graph
    assert "look" in graph.nodes
    assert (config.advantage.name, config.learner.epochs) == ("rloo", 2)


def test_the_commands_that_the_pages_name_exist() -> None:
    recipes = Path(__file__).parents[2] / "vla_rl" / "recipes"
    for page in PAGES.glob("*.md"):
        for module in set(re.findall(r"-m vla_rl\.recipes\.(\w+)", page.read_text())):
            assert (recipes / f"{module}.py").is_file(), module
        for other in re.findall(r"\]\(([\w/.]+\.md)\)", page.read_text()):
            assert (PAGES / other).is_file(), other
