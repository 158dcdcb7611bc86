"""Off-policy runs on the reaching task: they learn, resume where they were, and refuse what cannot be."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from toy_runs import SHARES_SERVERS, get_servers, small_mlp_run

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.replay import main as replay_command
from vla_rl.cli.report import write_report
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.learner import LearnerConfig, list_checkpoints, load_checkpoint
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.learner.off_policy.run_replay import list_needed_segments
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.off_policy_toy import OffPolicyToyConfig, main, new_policy
from vla_rl.recipes.srpo_toy import training_starts
from vla_rl.recipes.train_toy import new_policy as new_mlp
from vla_rl.replay import EpisodeRows, ReplayBuffer
from vla_rl.replay.config import RunReplayConfig
from vla_rl.replay.segments import list_segments, read_number, read_segment
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.run.offline import learn_offline
from vla_rl.run.train import Outcome, TrainingRun, train
from vla_rl.team.members import Member, Team

pytestmark = SHARES_SERVERS


def toy(root: Path, updates: int, **changes: Any) -> OffPolicyToyConfig:
    """A run that is the same whenever it is made: synchronous and deterministic."""
    config = OffPolicyToyConfig(
        run=RunConfig(name="toy", root=str(root), updates=updates, videos_every=50),
        scheduler=SchedulerConfig(groups_per_update=16, max_staleness=0, deterministic=True),
        engine=EngineConfig(is_deterministic=True),
        simulators=SimulatorConfig(num_envs=8, envs_per_process=8),
    )
    off_policy = msgspec.structs.replace(
        config.off_policy, first_rows=40, critic_first_steps=10, batch=32
    )
    return msgspec.structs.replace(config, **({"off_policy": off_policy} | changes))


async def run_toy(config: OffPolicyToyConfig, **options: Any) -> tuple[Outcome, SteeredPolicy]:
    policy = new_policy(config)
    async with asyncio.timeout(100):
        outcome = await train(
            config, training_starts(config), policy, fork_servers=get_servers(), **options
        )
    return outcome, policy


def weights(policy: SteeredPolicy) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


@pytest.mark.timeout(120)
async def test_the_toy_recipe_learns_to_reach_the_square(tmp_path: Path) -> None:
    config = OffPolicyToyConfig(
        run=RunConfig(name="toy", root=str(tmp_path), updates=16, videos_every=50),
        simulators=SimulatorConfig(num_envs=8, envs_per_process=8),
    )
    outcome, _ = await run_toy(config)
    lines = list(read_metrics(outcome.run.metrics))
    # the last updates may have had no new episode of their own
    rates = [line["rollout/success_rate"] for line in lines if "rollout/success_rate" in line]
    first, last = np.mean(rates[:3]), np.mean(rates[-3:])
    # actions are explored with noise of 0.8 of their range, in the last update too
    assert first < 0.4
    assert last > 0.65
    assert lines[-1]["replay/episodes"] == 16 * 32
    assert lines[-1]["actor/distance_to_base"] > 0.1
    assert lines[-1]["off_policy/updates_per_decision"] == pytest.approx(2.0, abs=0.1)
    assert 0.0 < lines[-1]["critic/q_mean"] < 1.0
    assert lines[-1]["replay/sampled_age"] > 1.0


async def test_a_resumed_run_is_equal_to_one_that_never_stopped(tmp_path: Path) -> None:
    whole, policy = await run_toy(toy(tmp_path / "whole", 5))
    part, _ = await run_toy(toy(tmp_path / "part", 3))
    resumed, found = await run_toy(
        toy(tmp_path / "part", 5), resume=RunDirectory.resume(part.run.path)
    )
    assert torch.equal(weights(policy), weights(found))
    ends = [list_checkpoints(run.run.checkpoints)[-1] for run in (whole, resumed)]
    states = [(await load_checkpoint(folder)).state.only for folder in ends]
    assert states[0].optimizer.keys() == states[1].optimizer.keys()
    assert all(
        torch.equal(value, states[1].optimizer[name]) for name, value in states[0].optimizer.items()
    )


async def test_a_resume_stores_no_episode_twice_and_keeps_those_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    first, _ = await run_toy(toy(tmp_path, 2))
    again, _ = await run_toy(
        toy(tmp_path, 3), resume=RunDirectory.resume(first.run.path), resume_from="update-000001"
    )
    lines = {line["update"]: line for line in read_metrics(again.run.metrics)}
    assert [lines[update]["replay/episodes"] for update in (1, 2, 3)] == [16, 32, 48]
    segments = {
        int(path.stem.removeprefix("segment-"))
        for path in (again.run.path / "replay").glob("segment-*.rows")
    }
    assert list_needed_segments(again.run.checkpoints) == segments


async def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    config = toy(tmp_path, 1)
    done, _ = await run_toy(config)
    for folder in list_checkpoints(done.run.checkpoints):
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()
    again, _ = await run_toy(config, resume=RunDirectory.resume(done.run.path))
    assert list(read_metrics(again.run.metrics))[-1]["replay/episodes"] == 16


async def test_rows_that_a_checkpoint_misses_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, _ = await run_toy(toy(tmp_path, 4))
    run = outcome.run.path
    assert replay_command(["check", str(run)]) == 0
    first, *others = list_segments(run / "replay")
    assert others
    first.unlink()
    assert replay_command(["check", str(run)]) == 1
    told = capsys.readouterr().out
    assert f"file {read_number(first)} is missing" in told
    assert f"{len(others)} of {len(others) + 1} files are whole" in told
    config = offline(tmp_path / "b", run, 1)
    with pytest.raises(DataError, match=f"misses file {read_number(first)} of its rows"):
        await learn_offline(config, new_policy(config))
    # what is left, if the folder of the rows itself is named
    await learn_offline(offline(tmp_path / "c", run / "replay", 1), new_policy(config))


async def test_rows_of_another_run_are_refused_or_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = RunReplayConfig(folder=str(tmp_path / "rows"))
    await run_toy(toy(tmp_path / "a", 1, replay=shared))
    with pytest.raises(DataError, match="expected none for a run that does not resume"):
        await run_toy(toy(tmp_path / "b", 1, replay=shared))
    loaded = msgspec.structs.replace(shared, existing="load")
    done, _ = await run_toy(toy(tmp_path / "c", 1, replay=loaded))
    assert list(read_metrics(done.run.metrics))[-1]["replay/episodes"] == 32
    assert "learns from them too" not in caplog.text
    await run_toy(toy(tmp_path / "d", 1, replay=loaded, task_ids=(2,)))
    assert "has rows of toy_reach/0, which this run has no episodes of" in caplog.text


async def test_a_resume_that_does_not_fit_leaves_its_run_as_it_was(tmp_path: Path) -> None:
    done, _ = await run_toy(toy(tmp_path, 1))
    run = RunDirectory.resume(done.run.path)
    before = run.config.read_bytes()
    other = toy(tmp_path, 2, off_policy=OffPolicyConfig(algorithm="sac", first_rows=40))
    with pytest.raises(CheckpointError, match="this one is sac"):
        await run_toy(other, resume=run)
    # demonstrations are stored before the first update, so a resume would pass them over
    shown = toy(tmp_path, 2, replay=RunReplayConfig(demonstrations=str(tmp_path)))
    with pytest.raises(ConfigError, match="began with None, and its episodes are stored"):
        await run_toy(shown, resume=run)
    with pytest.raises(ConfigError, match=r"replay.from is .* began with None"):
        await learn_offline(offline(tmp_path, tmp_path, 2), new_policy(shown), resume=run)
    assert run.config.read_bytes() == before


async def test_rows_of_another_base_are_refused(tmp_path: Path) -> None:
    shared = RunReplayConfig(folder=str(tmp_path / "rows"), existing="load")
    await run_toy(toy(tmp_path / "a", 1, replay=shared))
    other = toy(tmp_path / "b", 1, replay=shared)
    run = msgspec.structs.replace(other.run, seed=other.run.seed + 1)
    with pytest.raises(DataError, match="base"):
        await run_toy(msgspec.structs.replace(other, run=run))


def offline(root: Path, source: Path, updates: int, **changes: Any) -> OffPolicyToyConfig:
    """A run that learns from stored episodes alone."""
    config = toy(root, updates, replay=RunReplayConfig(source=str(source)), **changes)
    return msgspec.structs.replace(
        config, off_policy=msgspec.structs.replace(config.off_policy, offline_steps=20)
    )


async def test_a_run_learns_from_the_rows_of_another_one_without_an_environment(
    tmp_path: Path,
) -> None:
    first, _ = await run_toy(toy(tmp_path / "a", 2))
    config = offline(tmp_path / "b", first.run.path, 2)
    policy = new_policy(config)
    before = weights(policy)
    run = await learn_offline(config, policy)
    lines = list(read_metrics(run.metrics))
    assert [line["off_policy/steps"] for line in lines] == [20.0, 40.0]
    assert lines[-1]["replay/episodes"] == 32
    assert not torch.equal(before, weights(policy))
    longer = offline(tmp_path / "b", first.run.path, 3)
    resumed, whole = new_policy(longer), new_policy(longer)
    await learn_offline(longer, resumed, resume=RunDirectory.resume(run.path))
    await learn_offline(offline(tmp_path / "c", first.run.path, 3), whole)
    assert torch.equal(weights(resumed), weights(whole))
    assert "Values and measured" not in write_report(run).read_text()


async def test_a_run_learns_from_a_data_set_that_another_one_recorded(tmp_path: Path) -> None:
    config = toy(tmp_path / "a", 2)
    data = tmp_path / "data"
    run = msgspec.structs.replace(config.run, record_to=str(data))
    recorded, _ = await run_toy(msgspec.structs.replace(config, run=run))
    policy = new_policy(config)
    found = await learn_offline(offline(tmp_path / "b", data, 1), policy)
    rows, wanted = (stored_rows(each) for each in (found, recorded.run))
    line = list(read_metrics(found.metrics))[-1]
    assert line["replay/episodes"] == 32
    # what was recorded is what ran, so rewards, successes and inputs of the head are the same
    assert rows["is_success"].sum() == wanted["is_success"].sum()
    np.testing.assert_allclose(
        np.sort(rows["proprio"][rows["decision"] == 0], 0),
        np.sort(wanted["proprio"][wanted["decision"] == 0], 0),
        atol=1e-5,
    )


def stored_rows(run: RunDirectory) -> np.ndarray:
    segments = list_segments(run.path / "replay")
    return np.concatenate([read_segment(path)[2] for path in segments])


async def test_a_run_begins_with_its_demonstrations(tmp_path: Path) -> None:
    first, _ = await run_toy(toy(tmp_path / "a", 1))
    shared = RunReplayConfig(demonstrations=str(first.run.path))
    done, _ = await run_toy(toy(tmp_path / "b", 1, replay=shared))
    line = list(read_metrics(done.run.metrics))[-1]
    assert line["replay/episodes"] == 32
    assert 0.3 < line["replay/demonstration_share"] < 0.7


async def test_a_folder_without_episodes_is_refused(tmp_path: Path) -> None:
    config = offline(tmp_path / "b", tmp_path / "nothing", 1)
    with pytest.raises(ConfigError, match=r"replay.from is '.*nothing', which is not a folder"):
        await learn_offline(config, new_policy(config))
    assert not (tmp_path / "b").exists()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="has no rows of a replay buffer, and cannot be read as"):
        await learn_offline(config, new_policy(config))


async def dry_run(*arguments: str) -> int:
    return await main(
        parse_command(TrainingLaunch, OffPolicyToyConfig, "", ["--dry-run", *arguments])
    )


async def test_a_dry_run_looks_at_the_folders_that_episodes_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = new_policy(OffPolicyToyConfig())
    with ReplayBuffer(tmp_path / "rows", policy.layout) as buffer:
        rows = policy.layout.make_empty_rows(1)
        rows["num_rewards"], rows["terminated"] = 4, True
        buffer.append([EpisodeRows(episode_id=0, task="toy_reach/0", rows=rows)])
    root, shown = ("--run.root", str(tmp_path)), str(tmp_path / "rows")
    assert await dry_run("--replay.from", shown, *root) == 0
    told = capsys.readouterr().out
    assert f"16 updates of 500 gradient steps, without an environment, from {shown}" in told
    assert "simulators" not in told.partition("Memory estimate")[2]
    assert "would be dropped" not in told
    for option in ("--replay.from", "--replay.demonstrations"):
        with pytest.raises(ConfigError, match="'nowhere', which is not a folder"):
            await dry_run(option, "nowhere", *root)
        with pytest.raises(DataError, match="are not this policy's: base_digest"):
            await dry_run(option, shown, "--run.seed", "1", *root)


async def test_a_dry_run_says_if_the_stored_rows_are_more_than_the_buffer_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, shown = new_policy(OffPolicyToyConfig()).layout, str(tmp_path / "rows")
    rows = layout.make_empty_rows(100)
    rows["num_rewards"], rows["terminated"][-1] = 4, True
    with ReplayBuffer(Path(shown), layout) as buffer:
        buffer.append([EpisodeRows(episode_id=0, task="toy_reach/0", rows=rows)])
    root = ("--run.root", str(tmp_path))
    assert await dry_run("--replay.from", shown, "--replay.capacity", "99", *root) == 0
    assert (
        f"{shown} has 100 rows, those of other tasks included, and replay.capacity is 99: the oldest ones "
        "beyond it would be dropped"
    ) in capsys.readouterr().out


async def test_a_run_from_stored_episodes_alone_has_no_graph_to_draw(tmp_path: Path) -> None:
    drawing = tmp_path / "graph.svg"
    words = ["--replay.from", str(tmp_path), "--draw", str(drawing)]
    with pytest.raises(ConfigError, match=r"draw is .*graph.svg, but replay.from learns from"):
        await main(parse_command(TrainingLaunch, OffPolicyToyConfig, "", words))
    assert not drawing.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steering.proprio-size", "3"), "proprio_size is 3, expected at most 2, the numbers"),
        (("--off-policy.offline-steps", "5"), "offline_steps is 5, but nothing would read it"),
        (("--replay.from", "x", "--held-out.init-states", "3"), "held_out.init_states is '3', but"),
        (("--replay.from", "x", "--off-policy.first-rows", "9"), "first_rows is 9, but nothing"),
    ],
)
async def test_options_that_do_not_fit_are_refused_before_anything_starts(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        await dry_run(*arguments)
    assert message in str(caught.value.__context__ or caught.value)


def test_a_policy_of_another_robot_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shape = MlpConfig(state_size=3, action_low=(-1.0, -1.0), action_high=(1.0, 1.0), num_bins=5)
    MlpPolicy.create(shape, seed=0).save(tmp_path / "mlp")
    with pytest.raises(ConfigError, match="a state of 3 numbers, and gives actions of 2; expected"):
        new_policy(OffPolicyToyConfig(policy=str(tmp_path / "mlp")))


async def test_an_update_that_may_not_fit_into_the_buffer_is_refused(tmp_path: Path) -> None:
    # 32 episodes of up to 3 decisions each
    with pytest.raises(ConfigError, match="capacity is 90, expected at least 96: an update stores"):
        await dry_run("--replay.capacity", "90", "--off-policy.first-rows", "9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner": LearnerConfig(ranks=2)}, "LearnerConfig.ranks is 2, expected 1 with pipeline"),
        ({"engine": EngineConfig(kind="vllm")}, "engine 'vllm' cannot serve SteeredPolicy"),
        ({"off_policy": OffPolicyConfig(algorithm="dsrl")}, "'dsrl', which .*kind is 'residual'"),
        (
            {
                "off_policy": OffPolicyConfig(algorithm="dagger"),
                "steering": SteeringConfig(kind="tokens", hidden=(8,)),
            },
            "'dagger', but steering.kind is 'tokens'",
        ),
        ({"replay": RunReplayConfig(capacity=15)}, "capacity is 15, expected at least 16"),
        ({"replay": RunReplayConfig(capacity=39)}, "first_rows is 40, expected at most .* 39"),
    ],
)
def test_what_a_head_cannot_be_trained_with_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = toy(tmp_path, 1)
    synchronous = SchedulerConfig(groups_per_update=16)
    config = msgspec.structs.replace(
        config, **({"scheduler": synchronous, "engine": EngineConfig()} | changes)
    )
    with pytest.raises(ConfigError, match=message):
        TrainingRun(config, training_starts(config), new_policy(config))


def test_a_share_of_demonstrations_needs_some(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'rlpd', which takes 0.5 .* replay.demonstrations names none"
    ):
        OffPolicyToyConfig(off_policy=OffPolicyConfig(algorithm="rlpd"))
    with pytest.raises(ConfigError, match=r"'sac', which takes 0.1 of its rows"):
        OffPolicyToyConfig(off_policy=OffPolicyConfig(algorithm="sac", demonstration_share=0.1))
    without = OffPolicyConfig(algorithm="rlpd", demonstration_share=0.0)
    assert OffPolicyToyConfig(off_policy=without).off_policy.demonstrations == 0.0
    shown = RunReplayConfig(demonstrations=str(tmp_path))
    assert OffPolicyToyConfig(off_policy=OffPolicyConfig(algorithm="rlpd"), replay=shown)


def test_a_policy_without_a_head_and_a_team_are_refused(tmp_path: Path) -> None:
    config = toy(tmp_path, 1)
    starts = training_starts(config)
    mlp = new_mlp(small_mlp_run(tmp_path, "embodied_srpo"))
    with pytest.raises(ConfigError, match="the policy is a MlpPolicy; put a head over it"):
        TrainingRun(config, starts, mlp)
    head = new_policy(config)
    team = Team({"left": Member(head), "right": Member(head.copy())})
    with pytest.raises(ConfigError, match="trains the head of one policy"):
        TrainingRun(config, starts, team)
