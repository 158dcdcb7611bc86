"""A negative control: a critic that sees the action explains every return, and leaves nothing to learn.

advantage = return - value                what the action earned beyond the expected
value of observation and action = return  every advantage is what the fit left over
"""

from typing import Any

import msgspec
import numpy as np
import torch
from small_episodes import trajectory
from small_flow import observe, tiny_policy
from torch import Tensor

from vla_rl.engines import DeviceLane
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.types import ActionChunk, Sampling, Trajectory, with_drawn

NUM_EPISODES = 64
NUM_WARMUPS = 4
NUM_UPDATES = 12


class SeeingPolicy(FlowPolicy):
    """A policy whose features show a critic the executed chunk."""

    @property
    def feature_size(self) -> int:
        return super().feature_size + self.config.chunk_size * self.config.action_dim

    def features(self, batch: Any) -> Tensor:
        return torch.cat([super().features(batch), batch.end], 1)


def run_episodes(policy: FlowPolicy, update: int, *, shows_action: bool) -> list[Trajectory]:
    """Run episodes of one decision, which pay for large numbers in the first row of a chunk."""
    seen = [observe(number % 6) for number in range(NUM_EPISODES)]
    with torch.inference_mode():
        samplings = [Sampling(seed=1000 * update + number) for number in range(NUM_EPISODES)]
        found = policy.sample(policy.prepare(seen), samplings)
    assert found.chunk is not None
    actions = policy.decode(found.chunk.numpy())
    earned = torch.tanh(found.chunk[:, :3].mean(1)).numpy()
    episodes = []
    for number in range(NUM_EPISODES):
        drawn = {name: values[number, ...].numpy() for name, values in found.drawn.items()}
        chunk = ActionChunk(
            actions=actions[number],
            tokens=found.tokens[number].numpy(),
            log_probs=found.log_probs[number].numpy(),
            weight_version=max(0, update - NUM_WARMUPS),
            drawn=drawn,
        )
        made = trajectory([[float(earned[number])]], number)
        step = msgspec.structs.replace(
            made.steps[0],
            observation=with_drawn(seen[number], drawn) if shows_action else seen[number],
            chunk=chunk,
        )
        episodes.append(msgspec.structs.replace(made, steps=(step,)))
    return episodes


def hide_action(episode: Trajectory) -> Trajectory:
    (step,) = episode.steps
    seen = {key: value for key, value in step.observation.items() if key != "drawn"}
    return msgspec.structs.replace(
        episode, steps=(msgspec.structs.replace(step, observation=seen),)
    )


async def train(lane: DeviceLane, *, shows_action: bool) -> tuple[list[float], float]:
    """Train by PPO, the critic alone at first; return the mean return of each update, and how well the
    critic explains the last.
    """
    policy = tiny_policy()
    if shows_action:
        policy.__class__ = SeeingPolicy
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    fit = CriticConfig(
        optimizer=msgspec.structs.replace(optimizer, lr=1e-2), epochs=8, trunk="shared", hidden=32
    )
    critic = Critic(policy, lane, fit, seed=0)
    config = LearnerConfig(
        optimizer=optimizer, epochs=2, minibatch_trajectories=32, micro_batch=NUM_EPISODES
    )
    learner = Learner(policy, lane, config)
    curve, explained = [], 0.0
    for update in range(NUM_UPDATES):
        episodes = run_episodes(policy, update, shows_action=shows_action)
        returns = np.array([episode.steps[0].rewards[0] for episode in episodes])
        values = await critic.values(episodes)
        advantages = returns - np.array([each.values[0] for each in values])
        metrics = await critic.fit_values(episodes, values, [np.array([one]) for one in returns])
        explained = metrics["critic/explained_variance"]
        advantages = (advantages - advantages.mean()) / advantages.std()
        if update >= NUM_WARMUPS:
            await learner.update([hide_action(each) for each in episodes], advantages.tolist())
        curve.append(float(returns.mean()))
    return curve, explained


async def test_a_critic_that_sees_the_action_stops_learning(lane: DeviceLane) -> None:
    plain, _ = await train(lane, shows_action=False)
    control, explained = await train(lane, shows_action=True)
    # by its own measure it is nearly perfect
    assert explained > 0.9
    assert plain[:NUM_WARMUPS] == control[:NUM_WARMUPS]
    gains = [float(np.mean(curve[-2:]) - np.mean(curve[:4])) for curve in (plain, control)]
    assert gains[0] > 0.4
    assert gains[1] < 0.4 * gains[0]
