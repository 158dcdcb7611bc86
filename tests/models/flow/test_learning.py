"""Flow policies under a learner or a whole pipeline: ratios begin at one, a frozen prefix is computed once for all
epochs of an update, a critic that sees the action leaves nothing to learn.

advantage = return - value                what the action earned beyond the expected
value of observation and action = return  every advantage is what the fit left over
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import trajectory
from small_flow import observe, run_episodes, tiny_policy
from torch import Tensor, nn

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.learner.predictions import count_prefix_bytes
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.flow.trained_parts import choose_trained
from vla_rl.models.prismatic.action_tokens import ActionBounds
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.run.estimates import estimate_run
from vla_rl.run.train import train
from vla_rl.team.members import Team
from vla_rl.types import ActionChunk, Observation, Sampling, Trajectory, with_drawn

ADVANTAGES = [1.0, -1.0, 0.5]
NUM = 9
PLENTY = 2**30
OBSERVATIONS = [observe(seed) for seed in range(NUM)]


class ReadCounter:
    """Counts the observations that a network reads."""

    def __init__(self, policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        network: Any = policy.network
        self.num_rows, read = 0, network.embed_prefix

        def count(inputs: Any) -> Any:
            self.num_rows += len(inputs.images)
            return read(inputs)

        monkeypatch.setattr(policy.network, "embed_prefix", count)


def frozen_policy() -> FlowPolicy:
    policy = tiny_policy()
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    return policy


def decide(policy: FlowPolicy) -> tuple[list[Observation], Tensor]:
    """Return decided observations, with what was drawn, and the tokens."""
    with torch.inference_mode():
        samplings = [Sampling(seed=number) for number in range(NUM)]
        found = policy.sample(policy.prepare(OBSERVATIONS), samplings)
    rows = [
        with_drawn(each, {name: column[row].numpy() for name, column in found.drawn.items()})
        for row, each in enumerate(OBSERVATIONS)
    ]
    return rows, found.tokens.clone()


def score(policy: FlowPolicy, rows: list[Observation], tokens: Tensor) -> Tensor:
    return policy.log_probs(policy.prepare(rows), tokens, torch.ones(len(rows)))[0].detach()


def test_the_same_batch_gets_the_very_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = frozen_policy()
    rows, tokens = decide(policy)
    expected = score(policy, rows, tokens)
    policy.keep_prefixes(PLENTY)
    counter = ReadCounter(policy, monkeypatch)
    for _ in range(3):
        assert torch.equal(score(policy, rows, tokens), expected)
    assert counter.num_rows == NUM


def test_rows_of_several_batches_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = frozen_policy()
    rows, tokens = decide(policy)
    order = [8, 2, 5, 0, 7, 1, 3, 6, 4]
    expected = score(policy, [rows[row] for row in order], tokens[order])
    policy.keep_prefixes(PLENTY)
    counter = ReadCounter(policy, monkeypatch)
    # prompts of other lengths, a missing camera, and two rows that are new in the last batch
    for part in ([0, 1, 2], [3, 4], [5, 6]):
        score(policy, [rows[row] for row in part], tokens[part])
    found = score(policy, [rows[row] for row in order], tokens[order])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    assert counter.num_rows == NUM


def test_equal_observations_share_a_kept_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = frozen_policy()
    rows, tokens = decide(policy)
    group, chosen = [rows[0]] * 4 + [rows[1]] * 4, tokens[[0] * 4 + [1] * 4]
    expected = score(policy, group, chosen)
    policy.keep_prefixes(PLENTY)
    counter = ReadCounter(policy, monkeypatch)
    assert torch.equal(score(policy, group, chosen), expected)
    assert torch.equal(score(policy, group, chosen), expected)
    assert counter.num_rows == 2


def test_what_has_no_room_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = frozen_policy()
    rows, tokens = decide(policy)
    expected = score(policy, rows, tokens)
    prefix = policy.network.embed_prefix(policy.prepare(rows))  # type: ignore[operator]
    policy.keep_prefixes(4 * (prefix.num_bytes // NUM) + 10)
    counter = ReadCounter(policy, monkeypatch)
    for _ in range(3):
        found = score(policy, rows, tokens)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    assert counter.num_rows == NUM + 2 * (NUM - 4)


def test_acting_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = frozen_policy()
    policy.keep_prefixes(PLENTY)
    counter = ReadCounter(policy, monkeypatch)
    decide(policy)
    decide(policy)
    assert counter.num_rows == 2 * NUM


def test_new_weights_forget_what_was_kept() -> None:
    policy = frozen_policy()
    rows, tokens = decide(policy)
    policy.keep_prefixes(PLENTY)
    before = score(policy, rows, tokens)
    other = tiny_policy(seed=1)
    policy.load_checkpoint_tensors(other.checkpoint_tensors())
    assert torch.equal(score(policy, rows, tokens), score(other, rows, tokens))
    assert not torch.equal(score(policy, rows, tokens), before)


@pytest.mark.parametrize("part", ["all", "expert"])
def test_a_trained_prefix_is_not_kept(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    # the state is a token of this network's prefix, and fine-tuning trains its projection
    choose_trained(policy.network, part, None, seed=0)  # type: ignore[arg-type]
    assert not policy.has_frozen_prefix
    assert count_prefix_bytes(policy, LearnerConfig(epochs=4)) == 0
    policy.keep_prefixes(PLENTY)
    rows, tokens = decide(policy)
    counter = ReadCounter(policy, monkeypatch)
    score(policy, rows, tokens)
    score(policy, rows, tokens)
    assert counter.num_rows == 2 * NUM


def settings(**fields: Any) -> LearnerConfig:
    return LearnerConfig(epochs=4, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), **fields)


def trained(policy: FlowPolicy) -> list[nn.Parameter]:
    return [each for each in policy.network.parameters() if each.requires_grad]


async def test_an_update_is_the_same_to_the_bit_and_reads_each_row_once(
    lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = frozen_policy()
    episodes = await run_episodes(first, lane)
    keeping, computing = first.copy(), first.copy()
    learner = Learner(keeping, lane, settings())
    counter = ReadCounter(keeping, monkeypatch)
    report = await learner.update(episodes, ADVANTAGES)
    assert counter.num_rows == 6
    prefix = first.network.embed_prefix(first.prepare([observe(row) for row in range(6)]))  # type: ignore[operator]
    assert report.metrics["update/kept_prefix_gib"] == prefix.num_bytes / 2**30
    await Learner(computing, lane, settings(prefix_cache_gib=0.0)).update(episodes, ADVANTAGES)
    pairs = zip(trained(keeping), trained(computing), trained(first), strict=True)
    for one, other, start in pairs:
        assert torch.equal(one, other)
        assert not torch.equal(one, start)
    # nothing is left for the next update
    await learner.update(episodes, ADVANTAGES)
    assert counter.num_rows == 12


async def test_minibatches_of_another_composition_differ_by_rounding(lane: DeviceLane) -> None:
    first = frozen_policy()
    episodes = await run_episodes(first, lane)
    keeping, computing = first.copy(), first.copy()
    small = {"minibatch_trajectories": 1, "micro_batch": 2}
    await Learner(keeping, lane, settings(**small)).update(episodes, ADVANTAGES)
    config = settings(**small, prefix_cache_gib=0.0)
    await Learner(computing, lane, config).update(episodes, ADVANTAGES)
    for one, other in zip(trained(keeping), trained(computing), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("trunk", ["own", "shared"])
async def test_a_critic_reads_what_the_policy_keeps(
    trunk: str, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = frozen_policy()
    episodes = await run_episodes(policy, lane)
    critic = Critic(policy, lane, CriticConfig(trunk=trunk), seed=0)  # type: ignore[arg-type]
    learner = Learner(policy, lane, settings())
    counter = ReadCounter(policy, monkeypatch)
    await critic.values(episodes)
    await learner.update(episodes, ADVANTAGES)
    assert counter.num_rows == (6 if trunk == "shared" else 0)


def test_the_memory_estimate_knows_the_limit() -> None:
    policy = tiny_policy()
    config = TrainToyConfig(learner=LearnerConfig(epochs=4, prefix_cache_gib=0.5))
    trained = estimate_run(config, Team.of(policy))
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    frozen = estimate_run(config, Team.of(policy))
    assert trained is not None
    assert frozen is not None
    assert "kept prefixes" not in trained.memory.terms
    assert frozen.memory.terms["kept prefixes"] == 2**29


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


def run_paid_episodes(policy: FlowPolicy, update: int, *, shows_action: bool) -> list[Trajectory]:
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


async def train_on_paid_episodes(
    lane: DeviceLane, *, shows_action: bool
) -> tuple[list[float], float]:
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
        episodes = run_paid_episodes(policy, update, shows_action=shows_action)
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
    plain, _ = await train_on_paid_episodes(lane, shows_action=False)
    control, explained = await train_on_paid_episodes(lane, shows_action=True)
    # by its own measure it is nearly perfect
    assert explained > 0.9
    assert plain[:NUM_WARMUPS] == control[:NUM_WARMUPS]
    gains = [float(np.mean(curve[-2:]) - np.mean(curve[:4])) for curve in (plain, control)]
    assert gains[0] > 0.4
    assert gains[1] < 0.4 * gains[0]


SHAPE = SmallFlowConfig(
    actions=ActionBounds(low=(-1.0, -1.0), high=(1.0, 1.0), is_scaled=(True, True)),
    image_size=32,
    horizon=2,
    padded_dim=2,
    depth=2,
    num_heads=2,
    width=32,
    expert_width=24,
)


def make_moving_policy() -> FlowPolicy:
    """New ones predict no velocity at all; this one has learnt something."""
    policy = create_small_flow(SHAPE, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.mark.parametrize("pipeline", ["embodied_ppo", "embodied_grpo", "embodied_srpo", "nft"])
async def test_a_flow_policy_learns_by_every_pipeline_from_ratio_one(
    pipeline: str, tmp_path: Path
) -> None:
    config = with_pipeline(
        TrainToyConfig(
            run=RunConfig(name="flow", root=str(tmp_path), updates=2, videos_every=9),
            env_id=REACH,
            group_size=3,
            num_starts=4,
            step_limit=8,
            simulators=SimulatorConfig(num_envs=2, envs_per_process=2),
            scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0, deterministic=True),
            engine=EngineConfig(is_deterministic=True),
            embedding=EmbeddingConfig(encoder="state"),
            learner=LearnerConfig(micro_batch=5),
        ),
        pipeline,
    )
    policy, start = make_moving_policy(), make_moving_policy()
    async with asyncio.timeout(110):
        outcome = await train(config, training_starts(config), policy)
    lines: list[dict[str, Any]] = list(read_metrics(outcome.run.metrics))
    assert [line["update"] for line in lines] == [1, 2]
    trained = [line for line in lines if line["update/trained"]]
    # the chunk's ratio, and not that of a number: rounding adds up over the numbers
    assert all(line["update/log_prob_gap_max"] < 1e-5 for line in trained)
    assert all(line["update/ratio_mean"] == pytest.approx(1.0, abs=1e-5) for line in trained)
    assert ("critic/loss" in lines[0]) == (pipeline == "embodied_ppo")
    pairs = zip(policy.network.parameters(), start.network.parameters(), strict=True)
    assert bool(trained) == any(not torch.equal(one, other) for one, other in pairs)
    assert trained or pipeline != "embodied_ppo"
