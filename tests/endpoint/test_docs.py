"""What docs/endpoint.md shows runs exactly as it is shown."""

import importlib
import re
from pathlib import Path

import pytest
from byte_policy import BytePolicy

from vla_rl.types import EnvSpec, EpisodeSpec, StopReason

PAGE = Path(__file__).parents[2] / "docs" / "endpoint.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def pages(import_folder: Path) -> Path:
    for name, text in BLOCKS.items():
        (import_folder / name).write_text(text)
    return import_folder


async def test_an_agent_of_the_real_client_is_played_with_two_changed_lines(pages: Path) -> None:
    assert BLOCKS["my_agent.py"].count("# changed") == 2
    spec = EnvSpec(id="text/arithmetic", kwargs={"num_operators": 1, "min_tool_calls": 0})
    episode = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=spec, task="sums", seed=9, policy_seed=0
    )
    from vla_rl.envs.text.tasks.arithmetic import draw_problem

    problem = draw_problem(9, num_operators=1, num_digits=2, operators="+-")
    policy = BytePolicy("hmm", str(problem.value))
    trajectory = await importlib.import_module("play").play(episode, policy)
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert policy.requests[0][0][0].content == f"Think first. {problem.text}=?"
    assert (len(trajectory.steps), trajectory.info["num_threads"]) == (2, 1)
    assert trajectory.undiscounted_return == 1.0


def test_the_verifiers_page_imports(pages: Path) -> None:
    assert callable(importlib.import_module("verifiers_pool").play_row)
