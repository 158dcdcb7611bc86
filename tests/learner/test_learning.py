"""Learning: a tiny policy improves by its own trials, and by demonstrations."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.algorithms import group_advantage
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.learner import (
    Demonstration,
    ImitationConfig,
    Imitator,
    Learner,
    LearnerConfig,
    OptimizerConfig,
)
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
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
