"""A frozen prefix is computed once for all epochs of an update, and gives the numbers of a new one."""

from typing import Any

import pytest
import torch
from small_flow import observe, run_episodes, tiny_policy
from torch import Tensor, nn

from vla_rl.engines import DeviceLane
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.learner.prefixes import count_prefix_bytes
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.trained_parts import choose_trained
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.run.estimates import estimate_run
from vla_rl.team.members import Team
from vla_rl.types import Observation, Sampling, with_drawn

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
