"""The driving recipes from demonstrations to held-out scores, as small as they go."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.cli.command_line import Command, Launch, TrainingLaunch, parse_command
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.envs.driving.world import draw_world
from vla_rl.errors import ConfigError
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.openvla_oft import OpenVlaOft, tiny, unit_bounds
from vla_rl.models.prismatic.config import LIBERO_PROPRIO
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes import driving_training, grpo_bench2drive, sft_driving, srpo_driving_loop
from vla_rl.recipes.driving_training import (
    DRIVING_BASE,
    FORMAT,
    HeldOutScenesConfig,
    load_driver,
    training_starts,
)
from vla_rl.recipes.grpo_bench2drive import GrpoBench2DriveConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.grpo_navsim import GrpoNavsimConfig
from vla_rl.recipes.sft_driving import SftDrivingConfig
from vla_rl.recipes.srpo_driving import SrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.rollout import SchedulerConfig


def results_in(folder: Path) -> tuple[list[dict[str, float]], str]:
    """The held-out scores and the metrics of the only run in a folder."""
    (scores,) = folder.glob("driving*/held_out_scores.jsonl")
    (metrics,) = folder.glob("driving*/metrics.jsonl")
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    return lines, metrics.read_text()


def gain_in(folder: Path, updates: int, scenes: int) -> float:
    """How much the mean held-out score of the only run in a folder rose."""
    lines, _ = results_in(folder)
    before, after = (
        [line["total"] for line in lines if line["weights"] == version] for version in (0, updates)
    )
    assert len(before) == len(after) == scenes
    return float(np.mean(after) - np.mean(before))


def strips_in(folder: Path) -> tuple[set[str], str]:
    """The names of the strips of the only run in a folder, and its report."""
    (report,) = folder.glob("driving*/report.html")
    return {path.name for path in report.parent.glob("strips/*.jpg")}, report.read_text()


async def test_a_policy_imitates_the_planner_and_is_trained_on_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    trained = SftDrivingConfig(scenes=4, updates=2, batch=4, out=str(base))
    assert await sft_driving.main(Command(launch=Launch(), config=trained)) == 0
    config = GrpoDrivingConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=1, device="cpu"),
        policy=str(base),
        version="epdms_v2",
        group_size=2,
        scenes=4,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        held_out=HeldOutScenesConfig(scenes=3),
        simulators=SimulatorConfig(num_envs=2),
    )
    command = Command(launch=TrainingLaunch(), config=config)
    assert await driving_training.main(command) == 0
    lines, metrics = results_in(tmp_path)
    assert sorted((line["weights"], line["start"]) for line in lines) == [
        (version, scene) for version in (0, 1) for scene in range(3)
    ]
    named = {"ego_progress", "lane_keeping", "pdms_v1"}
    assert all(named <= set(line["parts"]) for line in lines)
    assert "score/ego_progress" in metrics
    assert "total " in capsys.readouterr().out
    strips, report = strips_in(tmp_path)
    kinds = {draw_world(scene, "held_out").kind for scene in range(3)}
    assert len(strips) == 2 * len(kinds)  # the first scene of each layout, before and after
    assert "Drives from above, before and after" in report
    assert "lane_keeping" in report


@pytest.mark.proof
async def test_twenty_updates_raise_the_held_out_score_of_the_shipped_policy(
    tmp_path: Path,
) -> None:
    config = GrpoDrivingConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=20, device="cpu"),
        held_out=HeldOutScenesConfig(scenes=150),
        simulators=SimulatorConfig(num_envs=2),
    )
    assert await driving_training.main(Command(launch=TrainingLaunch(), config=config)) == 0
    assert gain_in(tmp_path, updates=20, scenes=150) > 0.1


def test_a_policy_that_was_trained_with_other_rows_is_refused(tmp_path: Path) -> None:
    for trained in get_args(PlanAction):
        folder = str(tmp_path / trained)
        sft_driving.new_policy(0, trained, ROUTE_POINTS).save(tmp_path / trained)
        for action in get_args(PlanAction):
            if action == trained:
                load_driver(folder, FORMAT, "cpu", action, ROUTE_POINTS)
                continue
            with pytest.raises(
                ConfigError, match=f"was trained with '{trained}'.*--action {trained}"
            ):
                load_driver(folder, FORMAT, "cpu", action, ROUTE_POINTS)


@pytest.mark.parametrize("read", [0, 2])
def test_a_policy_that_reads_another_number_of_route_points_is_refused(
    read: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "policy")
    sft_driving.new_policy(0, "profiles", read).save(tmp_path / "policy")
    load_driver(folder, FORMAT, "cpu", "profiles", read)
    expected = f"route_points is 10, but .* reads {read} points .* set --route-points {read}"
    with pytest.raises(ConfigError, match=expected):
        load_driver(folder, FORMAT, "cpu", "profiles", 10)


def test_a_policy_that_reads_the_route_is_refused_where_none_is_known(tmp_path: Path) -> None:
    sft_driving.new_policy(0, "profiles", ROUTE_POINTS).save(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"reads 10 points .* scenes come without a route"):
        load_driver(str(tmp_path / "policy"), FORMAT, "cpu", "profiles", None)
    load_driver(str(DRIVING_BASE), FORMAT, "cpu", "moves", None)


def test_a_policy_whose_state_is_not_that_of_a_car_is_refused(tmp_path: Path) -> None:
    arm = tiny(cameras=("image",), proprio=LIBERO_PROPRIO, action_dim=3)
    OpenVlaOft.create(arm, 0).save(tmp_path / "arm")
    with pytest.raises(ConfigError, match="a state of 8 numbers, expected 10 and x and y of 0 to"):
        load_driver(str(tmp_path / "arm"), FORMAT, "cpu", "profiles", None)


def test_a_policy_of_another_family_drives_if_it_gives_plans_of_a_cars_state(
    tmp_path: Path,
) -> None:
    flow = SmallFlowConfig(
        actions=unit_bounds(3),
        state=StateConfig(mean=(0.0,) * 10, std=(1.0,) * 10),
        cameras=("image",),
        image_size=32,
        horizon=8,
        width=32,
        expert_width=24,
    )
    for name, config in (("car", flow), ("short", msgspec.structs.replace(flow, horizon=4))):
        create_small_flow(config, seed=0).save(tmp_path / name)
    policy = load_driver(str(tmp_path / "car"), FORMAT, "cpu", "moves", None)
    assert isinstance(policy, FlowPolicy)
    with pytest.raises(ConfigError, match="chunks of 4 rows of 3 numbers, expected 8 rows of 3"):
        load_driver(str(tmp_path / "short"), FORMAT, "cpu", "moves", None)


async def test_a_policy_has_as_many_action_tokens_as_were_asked_for(tmp_path: Path) -> None:
    base = tmp_path / "base"
    trained = SftDrivingConfig(scenes=1, updates=1, batch=1, bins=8, out=str(base))
    assert await sft_driving.main(Command(launch=Launch(), config=trained)) == 0
    policy = load_driver(str(base), FORMAT, "cpu", "along_route", ROUTE_POINTS)
    assert isinstance(policy, OpenVlaOft)
    first = policy.config.llm.vocab_size - 8
    values = policy.decode(np.repeat(np.arange(first, first + 8)[:, None], 24, 1))
    assert len(np.unique(values)) == 7


def test_a_careful_driver_is_slower_than_one_who_races() -> None:
    slow, fast = (
        sft_driving.demonstrate(range(6), driver, "along_route", ROUTE_POINTS, 0)
        for driver in ("careful", "racing")
    )
    pulls = [[each.actions[0, 0] for each in made] for made in (slow, fast)]
    assert np.mean(pulls[0]) < np.mean(pulls[1])


async def test_a_device_that_is_not_there_is_refused_before_demonstrations_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = SftDrivingConfig(device="cuda", out=str(tmp_path / "base"))
    with pytest.raises(ConfigError, match="device is 'cuda', but torch sees no GPU"):
        await sft_driving.main(Command(launch=Launch(), config=config))


def test_two_routes_are_two_plans_to_a_policy_that_reads_them() -> None:
    policy = sft_driving.new_policy(0, "profiles", 2)
    (demonstrated,) = sft_driving.demonstrate(range(1), "racing", "profiles", 2, 0)
    state = demonstrated.observation["state"].copy()
    assert state[10:].tolist() == demonstrated.observation["route"][:2].ravel().tolist()
    state[11::2] += 0.4  # both points farther to the left
    other = {**demonstrated.observation, "state": state}
    tokens = policy.encode(demonstrated.actions[None])
    batch = policy.prepare([demonstrated.observation, other])
    log_probs, _ = policy.log_probs(batch, torch.tensor(tokens).expand(2, -1), torch.ones(2))
    assert not torch.allclose(log_probs[0], log_probs[1])


@pytest.mark.parametrize(
    "config_type", [GrpoDrivingConfig, GrpoNavsimConfig, GrpoBench2DriveConfig]
)
def test_the_score_is_the_reward_whatever_a_pipeline_rewards_by_default(
    config_type: type[EmbodiedConfig],
) -> None:
    def parsed(*options: str) -> EmbodiedConfig:
        return parse_command(TrainingLaunch, config_type, "", list(options)).config

    own, ppo = parsed(), parsed("--pipeline", "embodied_ppo")
    assert (own.reward, own.advantage) == (config_type().reward, config_type().advantage)
    assert own.advantage.name == "dr_grpo"
    assert (ppo.reward.function, ppo.advantage.name) == ("environment", "gae")
    assert with_pipeline(config_type(), "embodied_ppo").reward == ppo.reward
    assert parsed("--reward.function", "success").reward.function == "success"


def test_srpo_makes_its_own_reward_and_refuses_another() -> None:
    def parsed(*options: str) -> SrpoDrivingConfig:
        return parse_command(TrainingLaunch, SrpoDrivingConfig, "", list(options)).config

    named = parsed("--pipeline", "embodied_srpo")
    assert named.reward == SrpoDrivingConfig().reward
    assert named.advantage.name == "dr_grpo"
    with pytest.raises(
        ConfigError, match="reward_of is 'comfort', but nothing would read it: srpo"
    ):
        parsed("--reward-of", "comfort")
    assert parsed("--pipeline", "embodied_grpo", "--reward-of", "comfort").reward_of == "comfort"


async def test_a_policy_learns_by_srpo_on_scenes_of_one_decision(tmp_path: Path) -> None:
    config = SrpoDrivingConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=1, device="cpu"),
        success_score=0.5,
        scenes=2,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        held_out=HeldOutScenesConfig(scenes=1),
        simulators=SimulatorConfig(num_envs=2),
    )
    assert await driving_training.main(Command(launch=TrainingLaunch(), config=config)) == 0
    lines, metrics = results_in(tmp_path)
    assert sorted((line["weights"], line["start"]) for line in lines) == [(0, 0), (1, 0)]
    (update,) = [json.loads(line) for line in metrics.splitlines() if "reward/mean" in line]
    assert 0.0 < update["reward/success_rate"] < 1.0
    assert update["reward/success_rate"] < update["reward/mean"] < 1.0
    assert "score/ego_progress" in update


@pytest.mark.proof
async def test_twenty_updates_of_srpo_raise_the_pdms_of_the_shipped_policy(tmp_path: Path) -> None:
    config = SrpoDrivingConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=20, device="cpu"),
        held_out=HeldOutScenesConfig(scenes=150, by_mean=True),
        simulators=SimulatorConfig(num_envs=2),
    )
    assert await driving_training.main(Command(launch=TrainingLaunch(), config=config)) == 0
    assert gain_in(tmp_path, updates=20, scenes=150) > 0.1


async def test_a_policy_learns_by_srpo_in_closed_loop(tmp_path: Path) -> None:
    config = SrpoDrivingLoopConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=1, device="cpu"),
        group_size=2,
        kinds=("straight", "tee"),
        scenes=2,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        held_out=HeldOutScenesConfig(scenes=2),
        simulators=SimulatorConfig(num_envs=2),
    )
    assert await srpo_driving_loop.main(Command(launch=TrainingLaunch(), config=config)) == 0
    lines, metrics = results_in(tmp_path)
    assert sorted((line["weights"], line["start"]) for line in lines) == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    named = {"completion", "red_light", "pdms_v1", "comfort"}
    assert all(named <= set(line["parts"]) for line in lines)
    assert "reward/failures_mean" in metrics
    strips, report = strips_in(tmp_path)
    assert strips == {
        f"drive-{kind}_scene-{scene}_weights-{version}.jpg"
        for kind, scene in (("straight", 0), ("tee", 1))
        for version in (0, 1)
    }
    assert "tee, held-out scene 1: weights 0 above, 1 below" in report


@pytest.mark.proof
@pytest.mark.timeout(2400)
async def test_thirty_updates_of_srpo_raise_the_driving_score_of_the_shipped_policy(
    tmp_path: Path,
) -> None:
    config = SrpoDrivingLoopConfig(
        run=RunConfig(name="driving", root=str(tmp_path), updates=30, device="cpu"),
        held_out=HeldOutScenesConfig(scenes=150, by_mean=True),
    )
    assert await srpo_driving_loop.main(Command(launch=TrainingLaunch(), config=config)) == 0
    assert gain_in(tmp_path, updates=30, scenes=150) > 0.02


def test_srpo_drives_each_layout_in_turn_and_refuses_unknown_ones() -> None:
    config = SrpoDrivingLoopConfig(scenes=2)
    starts = srpo_driving_loop.training_starts(config)
    assert [start.task for start in starts[:6]] == list(srpo_driving_loop.KINDS)
    assert len(starts) == 12
    episodes = srpo_driving_loop.held_out_episodes(config)
    assert {episode.env.kwargs["split"] for episode in episodes} == {"held_out"}
    with pytest.raises(ConfigError, match="kinds is"):
        SrpoDrivingLoopConfig(kinds=("motorway",))


def test_every_recipe_hands_the_meaning_of_the_rows_to_its_environment() -> None:
    envs = [
        GrpoDrivingConfig(action="profiles").env_of("train"),
        GrpoDrivingConfig(action="profiles").env_of("held_out"),
        GrpoNavsimConfig(action="profiles").env_of("train"),
        srpo_driving_loop.training_starts(SrpoDrivingLoopConfig(action="profiles", scenes=1))[
            0
        ].env,
        grpo_bench2drive.training_starts(GrpoBench2DriveConfig(action="profiles"))[0].env,
    ]
    assert [env.kwargs["action"] for env in envs] == ["profiles"] * 5
    assert GrpoDrivingConfig().env_of("train").kwargs["action"] == "along_route"


def test_every_recipe_with_a_route_hands_the_number_of_its_points_to_its_environment() -> None:
    envs = [
        GrpoDrivingConfig(route_points=3).env_of("train"),
        GrpoDrivingConfig(route_points=3).env_of("held_out"),
        srpo_driving_loop.training_starts(SrpoDrivingLoopConfig(route_points=3, scenes=1))[0].env,
        grpo_bench2drive.training_starts(GrpoBench2DriveConfig(route_points=3))[0].env,
    ]
    assert [env.kwargs["route_points"] for env in envs] == [3] * 4
    assert "route_points" not in GrpoNavsimConfig().env_of("train").kwargs


def test_training_scenes_and_held_out_scenes_are_of_other_splits() -> None:
    config = GrpoDrivingConfig(scenes=3)
    assert {start.env.kwargs["split"] for start in training_starts(config)} == {"train"}
    held_out = driving_training.held_out_episodes(config)
    assert {episode.env.kwargs["split"] for episode in held_out} == {"held_out"}
    assert len(held_out) == 500
    assert all(each.sampling.greedy and each.sampling.by_mean for each in held_out)
    control = msgspec.structs.replace(config, reward_of="ego_progress")
    assert training_starts(control)[0].env.kwargs["reward"] == "ego_progress"
