"""Policies of several kinds learn in one run; agents of recipes run on other hosts by name."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_episodes import trajectory

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.graph import Node, NodeOutput, Pipeline
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes import (
    driving_training,
    grpo_bench2drive,
    srpo_driving_loop,
    srpo_libero,
    srpo_toy,
    suite_training,
)
from vla_rl.recipes.driving_training import DRIVING
from vla_rl.recipes.grpo_bench2drive import GrpoBench2DriveConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.side_by_side import (
    SideBySideConfig,
    make_team,
    mix_starts,
    mixed_agent,
    mixed_starts,
    solved_or_scored,
)
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.remote_rollout.host_recipe import make_agent, make_agent_recipe
from vla_rl.reporting import read_metrics
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, embodied_agent
from vla_rl.run.parts import TrainingParts
from vla_rl.run.train import Outcome, train
from vla_rl.team.members import Member, Team
from vla_rl.types import EnvSpec, Group, StopReason, Trajectory

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)


def config_of(root: Path) -> SideBySideConfig:
    return SideBySideConfig(
        run=RunConfig(name="both", root=str(root), updates=2, device="cpu"),
        group_size=2,
        reward=RewardConfig(function="environment"),
        scheduler=SchedulerConfig(groups_per_update=4, max_staleness=1),
        simulators=SimulatorConfig(num_envs=2),
        text=TextPoolConfig(num_envs=4),
        chat=ChatLimits(max_turns=4, max_reply=4),
        policy=str(root / "base"),
        num_starts=8,
    )


def text_starts(task: str) -> list[TaskStart]:
    return [
        TaskStart(env=EnvSpec(id=f"rewarded_texts:{task}"), task="text", seed=seed)
        for seed in range(4)
    ]


def robot_starts(config: SideBySideConfig) -> list[TaskStart]:
    return srpo_toy.training_starts(srpo_toy.SrpoToyConfig(run=config.run))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def have_changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


class Watching:
    """An agent that counts what runs at the same time, and a node that keeps what the learners are
    told.
    """

    def __init__(self, config: SideBySideConfig) -> None:
        self._agent = mixed_agent(config.chat)
        self.running: Counter[str] = Counter()
        self.were_both = False
        self.updates: list[list[Group]] = []

    async def agent(self, env: Any, policies: Any) -> Trajectory:
        kind = "text" if env.episode.task == "text" else "robot"
        self.running[kind] += 1
        self.were_both |= min(self.running["text"], self.running["robot"]) > 0
        try:
            return await self._agent(env, policies)
        finally:
            self.running[kind] -= 1

    async def look(self, groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> NodeOutput:
        self.updates.append(list(groups))
        return NodeOutput(values={})

    def into(self, pipeline: Pipeline) -> Pipeline:
        return pipeline.insert_after(
            "advantage", Node.declare("look", self.look, reads=("groups", "advantages"))
        )


async def run(config: SideBySideConfig, task: str, team: Team, watching: Watching) -> Outcome:
    starts = mix_starts(robot_starts(config), text_starts(task), 0.5, config.num_starts)
    return await train(config, starts, team, agent=watching.agent, customise=watching.into)


async def test_both_run_at_once_and_each_learns_from_its_own_groups(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tiny(SHAPE, ["go on"], seed=0).save(tmp_path / "base")
    team, watching = make_team(config), Watching(config)
    team.members["robot"].model.save(tmp_path / "robot")  # type: ignore[union-attr]
    outcome = await run(config, "Checksum", team, watching)
    assert outcome.progress.num_episodes >= 16
    assert watching.were_both
    lines = {int(line["update"]): line for line in read_metrics(outcome.run.metrics)}
    for update, groups in enumerate(watching.updates, start=1):
        decisions = Counter(
            step.agent for group in groups for member in group.trajectories for step in member.steps
        )
        kinds = {
            group.task: {step.agent for each in group.trajectories for step in each.steps}
            for group in groups
        }
        assert kinds == {"toy_reach/0": {"robot"}, "text": {"language"}}
        for name in ("robot", "language"):
            assert lines[update][f"{name}/update/decisions"] == decisions[name]
            assert lines[update].get(f"{name}/update/log_prob_gap_max", 0.0) < 1e-3
    agents = outcome.run.checkpoints / "update-000002" / "agents"
    assert have_changed(weights_of(tmp_path / "robot"), weights_of(agents / "robot" / "policy"))
    assert have_changed(weights_of(tmp_path / "base"), weights_of(agents / "language" / "policy"))
    assert OpenVlaOft.load(agents / "robot" / "policy").network is not None
    assert CausalLanguageModel.load(agents / "language" / "policy").context_size == 512


# in the suite, three kinds of agents run below, each with a policy of its own too
@pytest.mark.proof
async def test_several_language_agents_may_run_beside_a_robot(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    robot = srpo_toy.new_policy(srpo_toy.SrpoToyConfig(run=config.run))
    names = ("left", "right")
    speakers = {name: Member(tiny(SHAPE, ["go on"], seed=seed)) for seed, name in enumerate(names)}
    outcome = await run(
        config, "ChecksumPair", Team({"robot": Member(robot), **speakers}), Watching(config)
    )
    agents = outcome.run.checkpoints / "update-000002" / "agents"
    assert sorted(path.name for path in agents.iterdir()) == ["left", "right", "robot"]
    last = max(read_metrics(outcome.run.metrics), key=lambda line: line["update"])
    assert all(last[f"{name}/update/decisions"] > 0 for name in ("robot", *names))


async def test_a_run_without_a_robots_policy_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    team = Team({"language": Member(tiny(SHAPE, ["go on"], seed=0))})
    with pytest.raises(
        ConfigError, match=r"needs the policy 'robot', but there is only one for \['language'\]"
    ):
        await run(config, "Checksum", team, Watching(config))


def test_starts_are_mixed_in_the_asked_proportion_and_repeat_where_there_are_few(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    robot, language = robot_starts(config), text_starts("Checksum")
    made = mix_starts(robot, language, 0.75, 8)
    assert [start.task for start in made] == ["toy_reach/0"] * 6 + ["text"] * 2
    assert made[4] == made[0]
    assert [start.task for start in mix_starts(robot, language, 0.01, 3)] == [
        "toy_reach/0",
        "text",
        "text",
    ]


async def test_three_kinds_run_in_one_run_and_each_policy_learns_from_its_own(
    tmp_path: Path,
) -> None:
    tiny(SHAPE, ["go on"], seed=0).save(tmp_path / "base")
    config = msgspec.structs.replace(
        config_of(tmp_path), robot_share=0.4, driving_share=0.3, num_starts=9
    )
    starts = mixed_starts(config)
    assert Counter(start.task for start in starts) == {
        "toy_reach/0": 4,
        "driving": 3,
        "text/arithmetic": 2,
    }
    # one group of each kind in turn, so that each update has all three
    by_kind = [
        [start for start in starts if start.task == task]
        for task in ("toy_reach/0", "driving", "text/arithmetic")
    ]
    turns = [start for turn in zip(*by_kind, strict=False) for start in turn]
    scheduler = SchedulerConfig(groups_per_update=6, max_staleness=0)
    run = msgspec.structs.replace(config.run, updates=1)
    outcome = await train(
        msgspec.structs.replace(config, scheduler=scheduler, run=run),
        turns,
        make_team(config),
        agent=mixed_agent(config.chat),
    )
    (line,) = read_metrics(outcome.run.metrics)
    assert all(line[f"{name}/update/decisions"] > 0 for name in ("robot", "language", "driver"))
    driver = OpenVlaOft.load(outcome.run.checkpoints / "update-000001/agents/driver/policy")
    assert driver.config.chunk_size == 8


def solved(env: EnvSpec, reward: float) -> Trajectory:
    ended = trajectory([[reward]], stop=StopReason.SUCCESS)
    return msgspec.structs.replace(ended, episode=msgspec.structs.replace(ended.episode, env=env))


def test_a_drive_earns_its_score_and_a_task_its_success() -> None:
    drive = solved(EnvSpec(id=DRIVING), reward=0.25)
    assert np.asarray(solved_or_scored(drive)).tolist() == [0.25]
    assert solved_or_scored(solved(EnvSpec(id="vla_rl/toy_reach-v0"), reward=0.25)) == 1.0


def test_the_robot_may_run_libero(tmp_path: Path) -> None:
    tiny(SHAPE, ["go on"], seed=0).save(tmp_path / "base")
    config = msgspec.structs.replace(config_of(tmp_path), robot="libero", robot_share=0.5)
    tasks = {start.task for start in mixed_starts(config)}
    assert tasks == {"libero_object/1", "text/arithmetic"}
    assert make_team(config).members["robot"].model.config.chunk_size == 8


def test_shares_that_leave_no_sums_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"driving_share is 0\.5, expected less"):
        msgspec.structs.replace(config_of(tmp_path), robot_share=0.5, driving_share=0.5)


def test_the_recipe_runs_reaching_and_sums(tmp_path: Path) -> None:
    config = msgspec.structs.replace(config_of(tmp_path), robot_share=0.25)
    tasks = [start.task for start in mixed_starts(config)]
    assert tasks == ["toy_reach/0"] * 2 + ["text/arithmetic"] * 6


def test_a_recording_of_the_robot_does_not_keep_the_sums_away(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    recorded = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, record_to=str(tmp_path / "data"))
    )
    assert mixed_starts(recorded) == mixed_starts(config)


def test_a_policy_that_has_to_be_looked_at_cannot_be_two(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    robot = srpo_toy.new_policy(srpo_toy.SrpoToyConfig(run=config.run))
    team = Team({"robot": Member(robot), "language": Member(tiny(SHAPE, ["go"], seed=0))})
    parts = TrainingParts(
        config, robot_starts(config) + text_starts("Checksum"), team, agent=embodied_agent
    )
    with pytest.raises(
        ConfigError, match=r"this run has several, of the agents \['language', 'robot'\]"
    ):
        _ = parts.model


CPU = RunConfig(name="hosts", device="cpu")


@pytest.mark.parametrize(
    ("main", "launches", "config"),
    [
        (srpo_libero.main, suite_training, SrpoLiberoConfig(run=CPU, assets="stand-ins")),
        (driving_training.main, driving_training, GrpoDrivingConfig(run=CPU)),
        (srpo_driving_loop.main, driving_training, SrpoDrivingLoopConfig(run=CPU)),
        (grpo_bench2drive.main, grpo_bench2drive, GrpoBench2DriveConfig(run=CPU)),
    ],
)
async def test_another_host_can_import_the_agent(
    main: Callable[[Any], Awaitable[int]],
    launches: Any,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = []

    async def launch(*arguments: Any) -> int:
        agents.append(arguments[-1])
        return 0

    monkeypatch.setattr(launches, "launch", launch)
    assert await main(Command(launch=TrainingLaunch(), config=config)) == 0
    (agent,) = agents
    assert make_agent(make_agent_recipe(agent)) is agent
