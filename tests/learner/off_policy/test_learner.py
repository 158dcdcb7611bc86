"""The off-policy learner: every algorithm learns, rows are stored before, the device lane is shared, refusals."""

import asyncio
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from head_learning import (
    BASE,
    REWARDED_FROM,
    make_decisions,
    make_head,
    mean_action,
    opened_learner,
)
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.learner.off_policy.batches import make_batch
from vla_rl.learner.off_policy.config import (
    DEFAULTS,
    ENTROPIC,
    IMITATING,
    Algorithm,
    OffPolicyConfig,
    RampConfig,
)
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.learner.off_policy.steps import STEPS, take_step
from vla_rl.models.steered import SteeredPolicy
from vla_rl.replay.config import RunReplayConfig
from vla_rl.replay.segments import list_segments
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory


async def act(
    policy: SteeredPolicy,
    lane: DeviceLane,
    episode_id: int,
    stop: StopReason = StopReason.SUCCESS,
    decisions: int = 3,
) -> Trajectory:
    """Return an episode whose decisions the policy made in the task's states."""
    numbers = np.random.default_rng(episode_id)
    observations = [
        {"state": numbers.normal(size=BASE.state_size).astype(np.float32)}
        for _ in range(decisions + 1)
    ]
    steps = []
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        for observation in observations[:-1]:
            chunk = await engine.act(observation, Sampling(seed=episode_id))
            steps.append(
                Step(observation=observation, chunk=chunk, rewards=np.zeros(1, np.float32))
            )
    spec = EpisodeSpec(
        episode_id=episode_id,
        group_id=0,
        member=0,
        env=EnvSpec(id="toy"),
        task="bandit",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec, steps=tuple(steps), final_observation=observations[-1], stop_reason=stop
    )


def weights(policy: SteeredPolicy) -> Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


async def test_an_update_stores_its_episodes_and_makes_the_steps_they_have_earned(
    tmp_path: Path,
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        settings: dict[str, Any] = {"first_rows": 1, "updates_per_decision": 1.5}
        with opened_learner(policy, lane, tmp_path, **settings) as learner:
            episodes = [await act(policy, lane, number) for number in (1000, 1001)]
            cut_off = await act(policy, lane, 1002, StopReason.TIME_LIMIT)
            rewards = [np.array([0, 0, 1], np.float32)] * 2 + [np.zeros(3, np.float32)]
            report = await learner.update([*episodes, cut_off], rewards)
            buffer = learner.replay.buffer
            assert buffer.num_episodes == 256 + 3
            # 9 decisions earn 13.5 gradient steps, of which half a one waits
            assert report.metrics["off_policy/steps"] == 13.0
            assert report.metrics["off_policy/owed_steps"] == 0.5
            assert report.weight_version == learner.weight_version == 1
            again = await learner.update(episodes, rewards[:2])
            assert buffer.num_episodes == 256 + 3
            assert again.metrics["update/decisions"] == 0.0
            rows = buffer.sample(seed=0, update=0, batch=2000)
    last = rows[(rows["episode"] == 1002) & (rows["decision"] == 2)][0]
    described = policy.describe_states([cut_off.final_observation])
    assert last["truncated"]
    np.testing.assert_array_equal(last["next_features"], described["features"][0])


async def test_values_go_on_behind_a_limit_unless_the_limit_is_part_of_the_task(
    tmp_path: Path,
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path) as learner:
            ends = [
                await act(policy, lane, 1000, StopReason.SUCCESS),
                await act(policy, lane, 1001, StopReason.TIME_LIMIT),
            ]
            await learner.update(ends, [np.zeros(3, np.float32)] * 2)
            drawn = learner.replay.buffer.sample(seed=0, update=0, batch=4000)
            layout, device = learner.replay.layout, torch.device("cpu")
    rows = drawn[(drawn["episode"] >= 1000) & (drawn["decision"] == 2)]
    is_success = rows["episode"] == 1000
    assert 0 < is_success.sum() < len(rows)
    goes_on = make_batch(rows, layout, OffPolicyConfig(), device).terminated
    ended = make_batch(rows, layout, OffPolicyConfig(bootstrap=False), device).terminated
    assert goes_on.tolist() == is_success.tolist()
    assert ended.all()


async def test_no_gradient_step_is_made_before_the_first_rows_are_there(tmp_path: Path) -> None:
    policy = make_head()
    before = weights(policy)
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, first_rows=300) as learner:
            episode = await act(policy, lane, 1000)
            report = await learner.update([episode], [np.zeros(3, np.float32)])
    assert report.metrics["update/trained"] == 0.0
    assert report.weight_version == 1
    assert torch.equal(before, weights(policy))


async def test_the_actor_waits_until_the_critic_has_learnt(tmp_path: Path) -> None:
    policy = make_head()
    before = weights(policy)
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, critic_first_steps=5) as learner:
            report = await learner.learn_steps(5)
            assert torch.equal(before, weights(policy))
            assert "actor/loss" not in report.metrics
            await learner.learn_steps(3)
    assert not torch.equal(before, weights(policy))


@pytest.mark.parametrize(
    ("algorithm", "wanted"), [("filtered_bc", "successes"), ("dagger", "labelled or successes")]
)
async def test_imitation_waits_while_no_row_is_worth_imitating_and_says_so_once(
    algorithm: str, wanted: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    before = weights(policy)
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, algorithm=algorithm) as learner:
            buffer = learner.replay.buffer
            # as if no episode had succeeded or been labelled yet
            buffer.missing_strata = lambda strata: [name for name in strata if name != "all"]  # type: ignore[method-assign, assignment]
            reports = [await learner.learn_steps(2) for _ in range(2)]
            with pytest.raises(
                ConfigError, match=f"none of 256 .* imitates rows that are {wanted}"
            ):
                learner.require_rows()
    assert torch.equal(before, weights(policy))
    for report in reports:
        assert "actor/loss" not in report.metrics
        assert report.metrics["off_policy/steps"] == report.metrics["update/trained"] == 0.0
    assert (
        caplog.text.count(f"has no row to imitate yet; off_policy.algorithm is {algorithm!r}") == 1
    )


async def test_a_share_without_rows_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, algorithm="rlpd") as learner:
            await learner.learn_steps(3)
    assert caplog.text.count("no row of demonstrations, expected 50 % of a batch") == 1


async def test_demonstrations_and_successes_have_their_shares_once_there_are_some(
    tmp_path: Path,
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, algorithm="rlpd") as learner:
            buffer = learner.replay.buffer
            demos = make_decisions(policy, buffer.layout, 4, first=5000)
            buffer.append(demos, is_demonstration=True, source="demos")
            seen: list[np.ndarray] = []
            sample = buffer.sample
            buffer.sample = lambda **call: seen.append(sample(**call)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
            await learner.learn_steps(1)
    assert (seen[0]["episode"] >= 5000).mean() == 0.5


@pytest.mark.parametrize(
    "algorithm", ["rlt", "td3_bc", "sac", "cql", "dsrl", "iql", "awr", "filtered_bc", "dagger"]
)
async def test_a_run_that_was_restored_goes_on_bit_for_bit(algorithm: str, tmp_path: Path) -> None:
    settings = {"algorithm": algorithm, "critic_first_steps": 2}
    policy, other = make_head(), make_head(seed=5)
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path / "a", **settings) as learner:
            await learner.learn_steps(5)
            state, stored = await learner.snapshot(), learner.replay.state()
            await learner.learn_steps(6)
            wanted = await learner.snapshot()
        # as a checkpoint's reader would: nothing of the first learner is left
        replay = RunReplay(other.layout, RunReplayConfig(folder=str(tmp_path / "a" / "replay")))
        resumed = OffPolicyLearner(
            other,
            lane,
            learner.config,
            replay,
            describe_states=other.describe_states,
            seed=7,
        )
        with replay.opened(tmp_path / "b", is_resumed=True, has_checkpoint=True):
            await resumed.restore(state)
            replay.restore(stored)
            assert resumed.weight_version == 1
            await resumed.learn_steps(6)
            found = await resumed.snapshot()
    assert found.weight_version == wanted.weight_version == 2
    for ours, theirs in ((found.policy, wanted.policy), (found.optimizer, wanted.optimizer)):
        assert isinstance(ours, Mapping)
        assert isinstance(theirs, Mapping)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_resume_without_a_checkpoint_begins_with_an_empty_folder_of_its_own(
    tmp_path: Path,
) -> None:
    policy = make_head()
    rows = make_decisions(policy, policy.layout, 4)
    replay = RunReplay(policy.layout, RunReplayConfig())
    with replay.opened(tmp_path) as buffer:
        buffer.append(rows)
    with replay.opened(tmp_path, is_resumed=True) as buffer:
        assert buffer.num_rows == 0


def test_a_resume_of_a_refused_run_leaves_the_rows_of_the_other_run_alone(tmp_path: Path) -> None:
    policy = make_head()
    shared = tmp_path / "shared"
    replay = RunReplay(policy.layout, RunReplayConfig(folder=str(shared)))
    with replay.opened(tmp_path / "first") as buffer:
        buffer.append(make_decisions(policy, policy.layout, 4))
    kept = list_segments(shared)
    for is_resumed in (False, True):
        with (
            pytest.raises(DataError, match="expected none for a run that does not resume"),
            replay.opened(tmp_path / "second", is_resumed=is_resumed),
        ):
            pass
    assert list_segments(shared) == kept != []


async def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path / "a", algorithm="iql") as learner:
            state = await learner.snapshot()
        other = opened_learner(policy, lane, tmp_path / "b", algorithm="td3_bc")
        with other as learner, pytest.raises(CheckpointError, match="this one is td3_bc"):
            await learner.restore(state)


async def test_acting_waits_for_one_gradient_step_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_head()
    acted, steps = threading.Event(), []

    def slow_step(*args: Any) -> Any:
        if len(steps) == 1:
            # asked in the middle of a step: the answer has to come before the one after the next
            loop.call_soon_threadsafe(asked.set)
        steps.append(acted.is_set())
        return take_step(*args)

    monkeypatch.setattr("vla_rl.learner.off_policy.learner.take_step", slow_step)
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path) as learner:
            learning = asyncio.create_task(learner.learn_steps(40))
            await asked.wait()
            await lane.run(acted.set, work="act")
            num_before = steps.index(True) if True in steps else len(steps)
            await learning
    assert len(steps) == 40
    assert num_before <= 4  # the one that ran, and those that were queued before the question


async def test_an_engine_gets_the_head_at_the_end_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_head()
    loop, has_moved = asyncio.get_running_loop(), asyncio.Event()

    def watched_step(*args: Any) -> Any:
        if not torch.equal(before, weights(policy)):
            loop.call_soon_threadsafe(has_moved.set)
        return take_step(*args)

    monkeypatch.setattr("vla_rl.learner.off_policy.learner.take_step", watched_step)
    async with DeviceLane(1) as lane:
        engine = TorchActionEngine(policy.copy(), lane, EngineConfig())
        with opened_learner(policy, lane, tmp_path, publish_to=[engine]) as learner:
            before = weights(policy)
            learning = asyncio.create_task(learner.learn_steps(60))
            await has_moved.wait()
            found = torch.cat([each.detach().flatten() for each in engine.network.parameters()])
            assert torch.equal(found, before)
            assert engine.weight_version == 0
            await learning
    found = torch.cat([each.detach().flatten() for each in engine.network.parameters()])
    assert torch.equal(found, weights(policy))
    assert engine.weight_version == 1


async def test_values_beyond_what_an_episode_can_earn_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, return_range=(0.0, 0.01)) as learner:
            critics = learner.training.critics
            assert critics is not None
            with torch.no_grad():
                critics.ensemble.layers[-1].bias.fill_(5.0)
            with caplog.at_level(logging.WARNING):
                await learner.learn_steps(1)
    assert "the critic's mean value is" in caplog.text


async def test_returns_that_targets_are_clamped_below_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        episodes = [await act(policy, lane, number) for number in (1000, 1001)]
        with opened_learner(policy, lane, tmp_path, first_rows=900) as learner:
            for episode in episodes:
                await learner.update([episode], [np.array([0, 0, 5], np.float32)])
    assert caplog.text.count("expected 0 to 1, to which targets are clamped") == 1
    assert "episode 1000 has a return of 5" in caplog.text


async def test_an_episode_of_another_policy_is_refused(tmp_path: Path) -> None:
    policy = make_head()
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path) as learner:
            plain = await act(policy, lane, 1)
            step = plain.steps[0]
            bare = Step(
                observation=step.observation,
                chunk=type(step.chunk)(
                    actions=step.chunk.actions,
                    tokens=step.chunk.tokens,
                    log_probs=step.chunk.log_probs,
                    weight_version=0,
                ),
                rewards=step.rewards,
            )
            other = Trajectory(
                episode=plain.episode,
                steps=(bare,),
                final_observation=plain.final_observation,
                stop_reason=StopReason.SUCCESS,
            )
            with pytest.raises(DataError, match="a steered policy"):
                await learner.update([other], [np.ones(1, np.float32)])


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
async def test_every_algorithm_moves_the_head_to_what_is_rewarded(
    algorithm: Algorithm, tmp_path: Path
) -> None:
    # dsrl's actor steers; one of the others' is the chunk itself
    kind = "tokens" if algorithm == "dsrl" else "residual"
    policy = make_head(kind, learns_std=algorithm in ENTROPIC)
    before = mean_action(policy)
    ramp = {"bc": RampConfig(first=0.1, last=0.1), "q": RampConfig(first=1.0, last=1.0)}
    async with DeviceLane(1) as lane:
        with opened_learner(policy, lane, tmp_path, algorithm=algorithm, **ramp) as learner:
            report = await learner.learn_steps(200)
    after = mean_action(policy)
    rewarded = (before[:, 0] > REWARDED_FROM).mean(), (after[:, 0] > REWARDED_FROM).mean()
    assert rewarded[0] < 0.3
    assert rewarded[1] > 0.8
    assert report.weight_version == 1
    assert ("critic/q_mean" in report.metrics) == (algorithm not in IMITATING)
    if algorithm not in IMITATING:
        # 35 of 100 uniform actions are rewarded
        assert report.metrics["critic/target_mean"] == pytest.approx(0.35, abs=0.12)


def test_every_name_has_defaults_and_a_step() -> None:
    assert set(get_args(Algorithm)) == set(DEFAULTS) == set(STEPS)


def test_rlpd_has_ten_critics_two_of_which_bootstrap_and_half_demonstrations() -> None:
    config = OffPolicyConfig(algorithm="rlpd")
    assert (config.num_critics, config.target_critics) == (10, 2)
    assert (config.steps_per_decision, config.demonstrations) == (20.0, 0.5)


def test_a_ramp_goes_from_its_first_weight_to_its_last() -> None:
    ramp = RampConfig(first=2.0, last=1.0, begin=10, steps=10)
    assert [ramp.value_at(step) for step in (0, 10, 15, 20, 99)] == [2.0, 2.0, 1.5, 1.0, 1.0]
