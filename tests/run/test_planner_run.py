"""A planner and a robot learn in one run: each from its own decisions, alone or both, resumed, recorded, shown."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from host_cluster import loopback_hosts
from safetensors.torch import load_file
from small_episodes import SHAPE as ROBOT_SHAPE
from small_worlds import LAMPS, SKILLS

from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.report import write_report
from vla_rl.cluster.config import ClusterConfig
from vla_rl.datasets import read_lerobot
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation.validation import Validation, read_validation, validation_path
from vla_rl.graph import Node, NodeOutput, Pipeline
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.models.mlp import MlpPolicy
from vla_rl.pipelines.config import PlannerTrainingConfig, RunConfig
from vla_rl.remote_rollout.host_recipe import make_agent, make_agent_recipe
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import PlannerConfig, SchedulerConfig, TaskStart, planner_agent
from vla_rl.run.train import Outcome, default_agent, train
from vla_rl.team.members import Member, Team
from vla_rl.types import Group, Sampling

STARTS = [TaskStart(env=LAMPS, task="lamps", seed=seed) for seed in range(4)]
PLANNER_SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=320,
    context_size=2048,
)


def config_of(root: Path, updates: int = 2, **fields: Any) -> PlannerTrainingConfig:
    config = PlannerTrainingConfig(
        run=RunConfig(
            name="planner", root=str(root), updates=updates, device="cpu", videos_every=1,
            keep_checkpoints=9,
        ),
        pipeline="embodied_grpo",
        advantage=AdvantageConfig(name="hierarchical_rloo"),
        group_size=4,
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0, deterministic=True),
        simulators=SimulatorConfig(num_envs=2),
        engine=EngineConfig(max_batch=1, is_deterministic=True, max_reply=48, max_context=2048),
        planner=PlannerConfig(max_turns=4, max_call_steps=6, max_reply=48),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=4096
        ),
    )  # fmt: skip
    return msgspec.structs.replace(config, **fields)


def team(learning: tuple[str, ...] | None = None) -> Team:
    words = ['{"name": "do", "arguments": {"instruction": "', *SKILLS]
    return Team(
        {
            "planner": Member(tiny(PLANNER_SHAPE, words, seed=1)),
            "robot": Member(MlpPolicy.create(ROBOT_SHAPE, seed=2)),
        },
        learning=learning,
    )


async def run(config: PlannerTrainingConfig, made: Team, **options: Any) -> Outcome:
    return await train(config, STARTS, made, **options)


def weights_of(run: RunDirectory, member: str) -> dict[str, torch.Tensor]:
    newest = max(run.path.glob("checkpoints/*"), key=lambda folder: folder.name)
    return load_file(newest / "agents" / member / "policy" / "model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Looking:
    """A node behind the advantages that keeps what it sees."""

    def __init__(self) -> None:
        self.updates: list[tuple[list[Group], list[np.ndarray]]] = []

    async def __call__(
        self, groups: Sequence[Group], advantages: Sequence[np.ndarray]
    ) -> NodeOutput:
        self.updates.append((list(groups), list(advantages)))
        return NodeOutput(values={})

    def into(self, pipeline: Pipeline) -> Pipeline:
        return pipeline.insert_after(
            "advantage", Node.declare("look", self, reads=("groups", "advantages"))
        )


async def test_both_learn_from_their_own_decisions_of_one_episode(tmp_path: Path) -> None:
    looking, made = Looking(), team()
    check = Validation(
        STARTS[:2], 1, partial(planner_agent, planner=PlannerConfig(max_turns=2)), Sampling()
    )
    outcome = await run(config_of(tmp_path), made, customise=looking.into, evaluator=check)
    lines = read_metrics(outcome.run.metrics)
    for line, (groups, advantages) in zip(lines, looking.updates, strict=True):
        steps = [step for group in groups for each in group.trajectories for step in each.steps]
        for name in ("planner", "robot"):
            count = sum(step.agent == name for step in steps)
            assert line[f"{name}/update/decisions"] == count > 0
            assert line[f"{name}/update/log_prob_gap_max"] < 1e-4
        for each, advantage in zip(groups[0].trajectories, advantages, strict=True):
            assert advantage.shape == (len(each.steps),)
            ran = sum(len(step.rewards) for step in each.steps if step.agent == "robot")
            assert sum(call["num_steps"] for call in each.info["calls"]) == ran
    assert list(read_validation(validation_path(outcome.run))) == [0, 2]
    videos = [path for path in outcome.run.videos.iterdir() if path.suffix == ".mp4"]
    assert videos
    for video in videos:
        lines_of = video.with_suffix(".txt").read_text().splitlines()
        assert lines_of[0] == "request: light both lamps"
        assert lines_of[-1].startswith("end: ")
    page = write_report(outcome.run).read_text()
    assert page.count("data:video/mp4;base64,") == min(len(videos), 3)
    assert "request: light both lamps" in page


@pytest.mark.parametrize("name", ["planner", "robot"])
async def test_one_may_learn_alone_while_the_other_keeps_its_weights(
    tmp_path: Path, name: str
) -> None:
    made = team((name,))
    before = {
        member: {key: value.clone() for key, value in each.model.network.state_dict().items()}
        for member, each in made.members.items()
    }
    await run(config_of(tmp_path), made)
    for member, each in made.members.items():
        has_changed = not are_equal(before[member], each.model.network.state_dict())
        assert has_changed == (member == name)


async def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole = await run(config_of(tmp_path / "whole", updates=3), team())
    part = await run(config_of(tmp_path / "part", updates=1), team())
    resumed = await run(
        config_of(tmp_path / "part", updates=3), team(), resume=RunDirectory.resume(part.run.path)
    )
    for member in ("planner", "robot"):
        assert are_equal(weights_of(whole.run, member), weights_of(resumed.run, member))


async def test_on_another_host_both_learn_what_they_learn_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}:{tests / 'support'}")
    local = await run(config_of(tmp_path / "here"), team())
    async with asyncio.timeout(200), loopback_hosts(tmp_path) as listed:
        config = config_of(tmp_path / "there", cluster=ClusterConfig(hosts=str(listed)))
        remote = await run(config, team())
    for member in ("planner", "robot"):
        assert are_equal(weights_of(local.run, member), weights_of(remote.run, member))
    assert read_metrics(remote.run.metrics)[-1]["hosts/far1/episodes"] == 2 * 4


async def test_a_recording_has_the_control_steps_with_what_the_planner_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, updates=1)
    recorded = msgspec.structs.replace(config.run, record_to=str(tmp_path / "data"))
    looking = Looking()
    await run(msgspec.structs.replace(config, run=recorded), team(), customise=looking.into)
    episodes = [each for group in looking.updates[0][0] for each in group.trajectories]
    ran = {
        tuple(
            step.observation["instruction"]
            for step in each.steps
            if step.agent == "robot"
            for _ in step.rewards
        )
        for each in episodes
    } - {()}
    found = {tuple(each.step_instructions) for each in read_lerobot(tmp_path / "data")}
    assert found == ran
    assert all(set(words) <= set(SKILLS) for words in found)


def test_the_agent_of_such_a_run_is_named_for_other_hosts() -> None:
    agent = default_agent(config_of(Path("runs")))
    made = make_agent(make_agent_recipe(agent))
    assert isinstance(made, partial)
    assert (made.func, made.keywords) == (
        planner_agent,
        {"planner": config_of(Path("runs")).planner},
    )


def test_learning_members_have_to_be_in_the_team() -> None:
    with pytest.raises(
        ConfigError, match=r"Team.learning is \('pilot',\), expected some of the members"
    ):
        team(("pilot",))
    with pytest.raises(ConfigError, match=r"Team.learning is \(\)"):
        team(())
