"""Learning: a tiny policy improves by its own trials, by demonstrations; a critic finds a known value function."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import mlp, run_policy, state, walk
from torch import Tensor

from vla_rl.algorithms import AdvantageConfig, advantage_estimator, group_advantage
from vla_rl.algorithms.losses import ValueLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError
from vla_rl.learner import (
    Critic,
    CriticConfig,
    Demonstration,
    ImitationConfig,
    Imitator,
    Learner,
    LearnerConfig,
    OptimizerConfig,
)
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.pipelines.nodes.advantages import reward_batch
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Group,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

GROUP_SIZE = 16
TARGET = {True: 0.6, False: -0.6}
"""The one step pays for moving along the first axis to where the brightness of the frame says."""


def bandit(is_bright: bool) -> Observation:
    return {"image": np.full((28, 28, 3), 230 if is_bright else 20, np.uint8), "instruction": "go"}


def reward_of(actions: np.ndarray, is_bright: bool) -> float:
    return -float(np.abs(actions[:, 0] - TARGET[is_bright]).mean())


def make_trajectory(
    observation: Observation, chunk: ActionChunk, reward: float, seed: int
) -> Trajectory:
    episode = EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=0,
        env=EnvSpec(id="bandit"),
        task="bandit",
        seed=0,
        policy_seed=seed,
    )
    step = Step(observation=observation, chunk=chunk, rewards=np.array([0.0, reward], np.float32))
    return Trajectory(
        episode=episode,
        steps=(step,),
        final_observation=observation,
        stop_reason=StopReason.TERMINATED,
    )


async def run_groups(engine: TorchActionEngine, seed: int) -> list[list[Trajectory]]:
    groups = []
    for is_bright in (True, False):
        seeds = [derive_seed(seed, is_bright, member) for member in range(GROUP_SIZE)]
        chunks = await asyncio.gather(
            *(engine.act(bandit(is_bright), Sampling(seed=each)) for each in seeds)
        )
        groups.append(
            [
                make_trajectory(bandit(is_bright), chunk, reward_of(chunk.actions, is_bright), each)
                for chunk, each in zip(chunks, seeds, strict=True)
            ]
        )
    return groups


def rewards_of(trajectories: Sequence[Trajectory]) -> list[float]:
    return [trajectory.undiscounted_return for trajectory in trajectories]


async def test_demonstrations_of_which_no_token_trains_are_refused_before_the_weights_move(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    demonstration = Demonstration(
        observation=bandit(is_bright=True),
        actions=np.zeros((2, 2), np.float32),
        num_valid=2,
        trained_tokens=np.zeros(4, np.bool_),
    )
    imitator = Imitator(policy, lane, ImitationConfig())
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError,
            match=r"none of the 8 demonstrated tokens is marked in Demonstration\.trained_tokens",
        ):
            await imitator.train_step([demonstration, demonstration])
    assert imitator.weight_version == 0


async def test_trial_and_error_trains_a_bandit(policy: OpenVlaOft, lane: DeviceLane) -> None:
    # the bonus keeps the policy from betting everything on one bin, after which equal rewards train
    # nothing
    config = LearnerConfig(optimizer=OptimizerConfig(lr=2e-3, warmup_steps=3), entropy_coef=0.02)
    mean_rewards = []
    async with asyncio.timeout(110), TorchActionEngine(policy, lane, EngineConfig()) as engine:
        learner = Learner(policy, lane, config, [engine])
        for update in range(20):
            groups = await run_groups(engine, update)
            trajectories = [trajectory for group in groups for trajectory in group]
            advantages = [
                a for group in groups for a in group_advantage(np.array(rewards_of(group)))
            ]
            mean_rewards.append(np.mean(rewards_of(trajectories)))
            report = await learner.update(trajectories, advantages)
            assert report.metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        greedy = {
            is_bright: (await engine.act(bandit(is_bright), Sampling(greedy=True))).actions
            for is_bright in TARGET
        }
    # a uniform guess is 0.68 away on average: (0.4**2 + 1.6**2) / 4
    assert np.mean(mean_rewards[:3]) < -0.55
    assert np.mean(mean_rewards[-5:]) > -0.3
    assert greedy[True][:, 0].mean() > 0.2
    assert greedy[False][:, 0].mean() < -0.2


def demonstrations(seed: int, num: int) -> list[Demonstration]:
    rng = np.random.default_rng(seed)
    examples = []
    for is_bright in rng.random(num) < 0.5:
        actions = np.full((2, 2), TARGET[bool(is_bright)], np.float32)
        actions[1] = np.nan  # after the end: anything may stand there
        examples.append(
            Demonstration(observation=bandit(bool(is_bright)), actions=actions, num_valid=1)
        )
    return examples


async def test_demonstrations_train_what_was_demonstrated_and_nothing_after_the_end(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    config = ImitationConfig(
        optimizer=OptimizerConfig(lr=4e-3, warmup_steps=3, decay_steps=30), micro_batch=4
    )
    async with asyncio.timeout(110):
        imitator = Imitator(policy, lane, config)
        losses = [
            (await imitator.train_step(demonstrations(seed, 8))).metrics["imitation/loss"]
            for seed in range(30)
        ]
        figures = await imitator.evaluate(demonstrations(1000, 16))
    assert losses[0] == pytest.approx(np.log(16), abs=0.3)  # 16 bins, all alike at first
    assert losses[-1] < 0.2
    assert imitator.weight_version == 30
    assert figures["imitation/token_accuracy"] == 1.0
    assert figures["imitation/l1"] < 1 / 15 + 1e-6  # half a bin of the 15 on [-1, 1]


async def test_the_imitation_gradient_does_not_depend_on_the_micro_batches(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    moments = []
    async with asyncio.timeout(60):
        for micro_batch in (100, 2):  # 5 rows, of which the last is alone
            imitator = Imitator(policy.copy(), lane, ImitationConfig(micro_batch=micro_batch))
            await imitator.train_step(demonstrations(0, 5))
            state = await imitator.snapshot()
            moments.append(
                torch.cat(
                    [v.flatten() for k, v in state.optimizer.items() if k.startswith("exp_avg/")]
                )
            )
    for other in moments[1:]:
        torch.testing.assert_close(other, moments[0], atol=1e-7, rtol=1e-4)


async def test_demonstrations_without_a_valid_step_are_refused(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    nothing = [msgspec.structs.replace(each, num_valid=0) for each in demonstrations(0, 2)]
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="no demonstrated control step is valid"):
            await Imitator(policy, lane, ImitationConfig()).train_step(nothing)


CONFIG = CriticConfig(
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0),
    loss=ValueLossConfig(clip=None),
    epochs=1,
    micro_batch=64,
)


def parameters(policy: MlpPolicy) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.network.parameters()])


# models/test_learning_families.py has critics of both kinds
@pytest.mark.parametrize("trunk", ["own", pytest.param("shared", marks=pytest.mark.proof)])
async def test_a_critic_learns_a_value_function_that_is_known(lane: DeviceLane, trunk: str) -> None:
    policy = mlp()
    before = parameters(policy)
    optimizer = OptimizerConfig(lr=2e-2, warmup_steps=0)
    config = msgspec.structs.replace(CONFIG, optimizer=optimizer, trunk=trunk, value_scale=10.0)
    critic = Critic(policy, lane, config, seed=0)

    def truth(trajectory):
        return np.array([20.0 + 10.0 * step.observation["state"][0] for step in trajectory.steps])

    explained = []
    async with asyncio.timeout(100):
        for update in range(100):
            trajectories = [walk(policy, 10 * update + seed, 8) for seed in range(4)]
            estimated = await critic.values(trajectories)
            metrics = await critic.fit_values(
                trajectories, estimated, [truth(trajectory) for trajectory in trajectories]
            )
            explained.append(metrics["critic/explained_variance"])
        ((value,),) = [
            estimated.values
            for estimated in await critic.values([run_policy(policy, 1, [state(1.0, 0.0)] * 2)])
        ]
    assert abs(explained[0]) < 1e-5  # a new head says 0 everywhere
    assert np.mean(explained[-10:]) > 0.95
    assert value == pytest.approx(30.0, abs=3.0)
    assert torch.equal(parameters(policy), before)


async def test_a_time_limit_is_continued_by_the_last_value_and_an_end_is_not(
    lane: DeviceLane,
) -> None:
    policy = mlp()
    observations = [state(0.1, 0.0), state(0.2, 0.0), state(0.3, 0.0)]
    ended = run_policy(policy, 1, observations, StopReason.TERMINATED)
    solved = run_policy(policy, 2, observations, StopReason.SUCCESS)
    cut_off = run_policy(policy, 3, observations, StopReason.TIME_LIMIT)
    in_time = run_policy(policy, 4, observations, StopReason.SUCCESS_AT_LIMIT)
    critic = Critic(policy, lane, CONFIG, seed=0)
    with torch.no_grad():
        critic.head.out.bias.fill_(5.0)  # V = 5 everywhere
    async with asyncio.timeout(30):
        estimated = await critic.values([ended, solved, cut_off, in_time])
    assert [each.bootstrap for each in estimated] == [
        0.0,
        0.0,
        pytest.approx(5.0),
        pytest.approx(5.0),
    ]
    group = Group(group_id=0, trajectories=(ended, solved, cut_off, in_time), dispatch_version=0)
    rewards = [[np.array([1.0, 1.0])] * 4]
    gae = advantage_estimator(AdvantageConfig(name="gae", gamma=0.5, lam=1.0, whiten=False))
    made = gae(reward_batch([group], rewards, estimated))
    # a chunk is two control steps, so a decision discounts by 0.25: returns are 1 + 0.25 * (1 +
    # 0.25 * bootstrap)
    continued = [1.25 + 0.0625 * 5.0, 1.0 + 0.25 * 5.0]
    expected = [[1.25, 1.0], [1.25, 1.0], continued, continued]
    np.testing.assert_allclose(made.returns_per_trajectory(), expected, rtol=1e-6)
    np.testing.assert_allclose(made.per_trajectory(), np.array(expected) - 5.0, rtol=1e-6)


async def test_a_critic_does_not_depend_on_its_micro_batches(lane: DeviceLane) -> None:
    policy = mlp()
    trajectories = [walk(policy, seed, num_steps) for seed, num_steps in ((1, 1), (2, 4), (3, 2))]
    returns = [np.arange(len(trajectory.steps), dtype=np.float32) for trajectory in trajectories]
    results = []
    async with asyncio.timeout(60):
        for micro_batch in (100, 1, 3):
            critic = Critic(
                policy,
                lane,
                msgspec.structs.replace(CONFIG, micro_batch=micro_batch, epochs=3),
                seed=0,
            )
            await critic.fit_values(trajectories, await critic.values(trajectories), returns)
            results.append((await critic.values(trajectories))[1].values)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-4)
    assert np.abs(results[0]).max() > 0.0


async def test_metrics_tell_values_in_units_of_reward_and_how_much_the_steps_were_clipped(
    lane: DeviceLane,
) -> None:
    policy = mlp()
    trajectories = [walk(policy, seed, 4) for seed in (1, 2)]
    returns = [np.full(4, 30.0, np.float32), np.full(4, 50.0, np.float32)]
    config = msgspec.structs.replace(
        CONFIG, value_scale=10.0, loss=ValueLossConfig(clip=1e-4), epochs=8
    )
    critic = Critic(policy, lane, config, seed=0)
    with torch.no_grad():
        critic.head.out.bias.fill_(2.0)  # V = 20 everywhere
    async with asyncio.timeout(60):
        metrics = await critic.fit_values(trajectories, await critic.values(trajectories), returns)
    assert metrics["critic/value_mean"] == pytest.approx(20.0)
    assert metrics["critic/return_mean"] == pytest.approx(40.0)
    assert (
        metrics["critic/value_clip_fraction"] == 0.875
    )  # after the first of 8 steps all values are nearer than the clip


async def test_a_critic_learns_from_an_update_once(lane: DeviceLane) -> None:
    policy = mlp()
    trajectories = [walk(policy, seed, 3) for seed in (1, 2)]
    returns = [np.ones(3, np.float32), np.zeros(3, np.float32)]
    critic = Critic(policy, lane, CONFIG, seed=0)
    async with asyncio.timeout(60):
        estimated = await critic.values(trajectories)
        assert await critic.fit_values(trajectories, estimated, returns, number=4)
        once = await critic.snapshot()
        assert await critic.fit_values(trajectories, estimated, returns, number=4) == {}
        again = await critic.snapshot()
        assert await critic.fit_values(trajectories, estimated, returns, number=5)
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not all(
        torch.equal(once[name], tensor) for name, tensor in (await critic.snapshot()).items()
    )


async def test_a_restored_critic_goes_on_as_if_nothing_had_happened(lane: DeviceLane) -> None:
    policy = mlp()
    trajectories = [walk(policy, seed, 3) for seed in (1, 2, 3, 4)]
    returns = [np.ones(3, np.float32) * seed for seed in range(4)]
    config = msgspec.structs.replace(CONFIG, minibatch_trajectories=2)

    async def update(critic: Critic) -> None:
        await critic.fit_values(trajectories, await critic.values(trajectories), returns)

    async with asyncio.timeout(60):
        critic, other = Critic(policy, lane, config, seed=0), Critic(policy, lane, config, seed=0)
        await update(critic)
        saved = await critic.snapshot()
        await update(critic)
        await other.restore(saved)
        await update(other)
        one, two = await critic.snapshot(), await other.snapshot()
        assert all(torch.equal(one[name], two[name]) for name in one)
        with pytest.raises(CheckpointError, match="the checkpoint's critic is not this one"):
            await other.restore({})


@pytest.mark.parametrize("returns", [[np.ones(2)], [np.ones(3)], [np.array([1.0, np.nan])] * 2])
async def test_returns_that_do_not_fit_are_refused(
    lane: DeviceLane, returns: list[np.ndarray]
) -> None:
    policy = mlp()
    trajectories: list[Trajectory] = [walk(policy, seed, 2) for seed in (1, 2)]
    critic = Critic(policy, lane, CONFIG, seed=0)
    async with asyncio.timeout(30):
        estimated = await critic.values(trajectories)
        with pytest.raises(ValueError, match="returns"):
            await critic.fit_values(
                trajectories, estimated, returns if len(returns) == 1 else returns[:1] * 2
            )


async def test_features_of_another_width_than_was_said_are_refused(lane: DeviceLane) -> None:
    class Wider(MlpPolicy):
        feature_size = 7

    policy = mlp()
    policy.__class__ = Wider
    critic = Critic(policy, lane, CONFIG, seed=0)
    with pytest.raises(ValueError, match=r"features gave \[8, \d+\], expected \[B, 7\]"):
        await critic.values([walk(mlp(), 0, 8)])
