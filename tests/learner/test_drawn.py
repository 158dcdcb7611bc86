"""What a decision drew beside its tokens reaches losses, those of predictions included; nothing else sees it."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import DrawingPolicy, make_drawing_policy, mlp, run_episodes, trajectory

from vla_rl.actors.wire.codec import Codec
from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import ConfigError, PolicyError
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.distributed.messages import read_observations
from vla_rl.models.example_inputs import example_row
from vla_rl.remote_rollout.episode_store import materialise, split_arrays
from vla_rl.rollout import EpisodePolicy, copy_chunk
from vla_rl.types import ActionChunk, Sampling, Step, StopReason, Trajectory, with_drawn


async def run_episode(policy: DrawingPolicy, lane: DeviceLane, number: int = 0) -> Trajectory:
    """Three decisions through the engine and the policy of an episode."""
    made_up = trajectory([[1.0, 1.0], [0.0, 0.0], [1.0]], number, StopReason.TIME_LIMIT)
    steps = []
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        acting = EpisodePolicy(engine, made_up.episode)
        for index, step in enumerate(made_up.steps):
            seen = {"state": np.array([index, number], np.float32)}
            chunk = copy_chunk(await acting.act(seen, Sampling()))
            steps.append(Step(observation=seen, chunk=chunk, rewards=step.rewards))
    last = {"state": np.ones(2, np.float32)}
    return msgspec.structs.replace(made_up, steps=tuple(steps), final_observation=last)


def without_drawn(episode: Trajectory, number: int) -> Trajectory:
    steps = list(episode.steps)
    chunk = msgspec.structs.replace(steps[number].chunk, drawn=None)
    steps[number] = msgspec.structs.replace(steps[number], chunk=chunk)
    return msgspec.structs.replace(episode, steps=tuple(steps))


@pytest.fixture
def policy() -> DrawingPolicy:
    return make_drawing_policy()


async def test_a_decision_keeps_what_its_policy_drew(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episode = await run_episode(policy, lane)
    chunk = episode.steps[0].chunk
    assert chunk.drawn is not None
    assert {name: (each.dtype, each.shape) for name, each in chunk.drawn.items()} == {
        "state_before": (np.float32, (2,)),
        "step": (np.int64, ()),
        "mean": (np.float32, (2,)),
    }
    # Decoded is the end of the chain, and scored is the state on the way.
    np.testing.assert_array_equal(chunk.actions[:, 0], 2.0 * chunk.tokens)


async def test_a_rows_observation_holds_what_was_drawn_and_the_trajectorys_does_not(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episode = await run_episode(policy, lane)
    rows = flatten_trajectories([episode], [1.0])
    for step, observation in zip(episode.steps, rows.observations, strict=True):
        assert observation["drawn"] == step.chunk.drawn
        assert "drawn" not in step.observation
    assert rows.mask.tolist() == [[True, True], [True, True], [True, False]]


async def test_the_first_ratio_of_an_update_is_1(policy: DrawingPolicy, lane: DeviceLane) -> None:
    episode = [await run_episode(policy, lane, number) for number in range(3)]
    learner = Learner(policy.copy(), lane, LearnerConfig(micro_batch=2))
    report = await learner.update(episode, [1.0, -1.0, 0.5])
    assert report.metrics["update/log_prob_gap_max"] < 1e-6
    assert report.metrics["update/trained"] == 1.0


async def test_a_state_of_another_decision_is_noticed(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episode = await run_episode(policy, lane)
    first, *others = episode.steps
    chunk = msgspec.structs.replace(first.chunk, drawn=others[0].chunk.drawn)
    swapped = msgspec.structs.replace(first, chunk=chunk)
    episode = msgspec.structs.replace(episode, steps=(swapped, *others))
    report = await Learner(policy.copy(), lane, LearnerConfig(max_mismatch=9.0)).update(
        [episode], [1.0]
    )
    assert report.metrics["update/log_prob_gap_max"] > 0.01


@pytest.mark.parametrize("scored_by", ["learner", "reference"])
async def test_a_decision_without_what_it_drew_is_named_with_its_episode(
    policy: DrawingPolicy, lane: DeviceLane, scored_by: str
) -> None:
    older = without_drawn(await run_episode(policy, lane, number=7), 1)
    scoring = (
        Learner(policy.copy(), lane, LearnerConfig()).update([older], [1.0])
        if scored_by == "learner"
        else Reference(policy, lane, micro_batch=4).log_probs([older])
    )
    with pytest.raises(ValueError, match=r"decision 1 of episode 7 .* `drawn` is missing"):
        await scoring


async def test_a_step_outside_the_chain_is_named_with_its_episode(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episode = await run_episode(policy, lane, number=3)
    first, *others = episode.steps
    assert first.chunk.drawn is not None
    chunk = msgspec.structs.replace(first.chunk, drawn={**first.chunk.drawn, "step": np.array(4)})
    broken = msgspec.structs.replace(first, chunk=chunk)
    broken_episode = msgspec.structs.replace(episode, steps=(broken, *others))
    with pytest.raises(ValueError, match=r"decision 0 of episode 3 .* step is 4, expected 0 to 3"):
        await Learner(policy.copy(), lane, LearnerConfig()).update([broken_episode], [1.0])


async def test_a_critic_sees_the_observation_alone(
    policy: DrawingPolicy, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await run_episode(policy, lane)
    prepared: list[Any] = []
    prepare = DrawingPolicy.prepare
    monkeypatch.setattr(
        DrawingPolicy,
        "prepare",
        lambda self, seen: prepared.extend(seen) or prepare(self, seen),  # type: ignore[func-returns-value]
    )
    critic = Critic(policy, lane, CriticConfig(), seed=0)
    values = await critic.values([episode])
    await critic.fit_values([episode], values, [np.ones(3, np.float32)])
    assert len(prepared) >= 7
    assert all(set(seen) == {"state"} for seen in prepared)


async def test_the_wire_and_an_episode_store_give_back_what_was_drawn(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episode = await run_episode(policy, lane)
    wide = {"state_before": np.arange(400, dtype=np.float32), "step": np.array(2)}
    first = msgspec.structs.replace(
        episode.steps[0], chunk=msgspec.structs.replace(episode.steps[0].chunk, drawn=wide)
    )
    episode = msgspec.structs.replace(episode, steps=(first, *episode.steps[1:]))
    metadata, arrays = split_arrays(episode)
    assert "0/chunk/drawn/state_before" in arrays
    codec = Codec()
    metadata, arrays = codec.decode(
        codec.get_decoder(tuple[Trajectory, dict[str, np.ndarray]]),
        codec.encode(0, 0, 0, 0, (metadata, arrays), "an episode"),
    )
    found = materialise(metadata, arrays)
    for before, after in zip(episode.steps, found.steps, strict=True):
        assert before.chunk.drawn is not None
        assert after.chunk.drawn is not None
        assert list(after.chunk.drawn) == list(before.chunk.drawn)
        for name, values in before.chunk.drawn.items():
            np.testing.assert_array_equal(after.chunk.drawn[name], values)
            assert after.chunk.drawn[name].dtype == values.dtype


def test_a_chunk_of_an_earlier_version_has_drawn_nothing() -> None:
    chunk = trajectory([[1.0]]).steps[0].chunk
    codec = Codec()
    fields = {name: getattr(chunk, name) for name in chunk.__struct_fields__ if name != "drawn"}
    frames = codec.encode(0, 0, 0, 0, fields, "a chunk")
    assert codec.decode(codec.get_decoder(ActionChunk), frames).drawn is None


def test_a_rank_gets_drawn_arrays_of_its_own() -> None:
    array = np.ones(3, np.float32)
    array.setflags(write=False)
    (found,) = read_observations([with_drawn({"state": array}, {"state_before": array})])
    assert found["drawn"]["state_before"].flags.writeable


def test_an_observation_of_that_name_is_refused() -> None:
    with pytest.raises(ValueError, match="rename it in the environment"):
        with_drawn({"drawn": 1}, {"step": np.array(0)})
    assert with_drawn({"drawn": 1}, None) == {"drawn": 1}


def test_an_estimate_scores_what_the_family_says_it_sees(policy: DrawingPolicy) -> None:
    row = example_row(policy)
    assert row is not None
    log_probs, _ = policy.log_probs(row.batch, row.tokens, torch.ones(1))
    assert log_probs.shape == (1, 2)


async def test_a_sample_that_is_a_pair_is_refused(
    policy: DrawingPolicy, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DrawingPolicy, "sample", lambda self, batch, samplings: (torch.ones(1, 2), torch.ones(1, 2))
    )
    async with asyncio.timeout(20), TorchActionEngine(policy, lane, EngineConfig()) as engine:
        with pytest.raises(PolicyError, match=r"DrawingPolicy.sample gave a tuple, expected"):
            await engine.act({"state": np.zeros(2, np.float32)})


ADVANTAGES = [1.0, -1.0, 0.5]

NFT = PolicyLossConfig(name="nft")

EXACT = PolicyLossConfig(kl=KlLossConfig(coef=0.1, estimator="exact"))


def settings(loss: PolicyLossConfig, **fields: Any) -> LearnerConfig:
    optimizer = OptimizerConfig(lr=0.01, warmup_steps=0)
    return LearnerConfig(loss=loss, optimizer=optimizer, aggregation="token_mean", **fields)


def weights(policy: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


async def test_good_decisions_come_nearer_and_bad_ones_go_away(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    learner = Learner(policy, lane, settings(NFT, epochs=3))
    before = await Reference(policy, lane, micro_batch=8).log_probs(episodes)
    report = await learner.update(episodes, [1.0, -1.0, 0.0])
    after = await Reference(policy, lane, micro_batch=8).log_probs(episodes)
    moved = [np.mean(now) - np.mean(old) for now, old in zip(after, before, strict=True)]
    assert moved[0] > 0.0 > moved[1]
    assert report.metrics["update/steps"] == 3.0
    assert report.metrics["update/behavior_kl"] > 0.0


async def test_the_first_step_begins_at_the_weights_that_acted(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    report = await Learner(policy, lane, settings(NFT)).update(episodes, ADVANTAGES)
    assert report.metrics["update/behavior_kl"] < 1e-12
    # softplus(0), spread over the four tokens of two decisions
    assert report.metrics["update/loss"] == pytest.approx(np.log(2.0) / 2.0, rel=1e-6)


async def test_the_exact_divergence_is_that_of_the_means(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    reference = Reference(policy, lane, micro_batch=8, kl=EXACT.kl)
    means = await reference.log_probs(episodes)
    for episode, found in zip(episodes, means, strict=True):
        for step, mean in zip(episode.steps, found, strict=True):
            assert step.chunk.drawn is not None
            np.testing.assert_allclose(mean, step.chunk.drawn["mean"], atol=1e-6)
    displaced = [[mean + 0.2 for mean in found] for found in means]
    report = await Learner(policy, lane, settings(EXACT)).update(episodes, ADVANTAGES, displaced)
    # (0.2)^2 / 2 with a deviation of 1
    assert report.metrics["update/reference_kl"] == pytest.approx(0.02, rel=1e-4)


async def test_an_update_stops_before_it_is_too_far(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    free, bound = policy.copy(), policy.copy()
    plain = PolicyLossConfig()
    all_steps = await Learner(free, lane, settings(plain, epochs=10)).update(episodes, ADVANTAGES)
    stopping = Learner(bound, lane, settings(plain, epochs=10, stop_kl=1e-3))
    stopped = await stopping.update(episodes, ADVANTAGES)
    assert all_steps.metrics["update/steps"] == 10.0
    assert 1.0 <= stopped.metrics["update/steps"] < 10.0
    assert stopped.weight_version == stopping.weight_version == 1
    start = weights(policy)
    assert (weights(bound) - start).norm() < (weights(free) - start).norm()
    # a gradient that was computed and not taken is not left for the next update
    assert (await stopping.update(episodes, ADVANTAGES)).weight_version == 2


async def test_a_policy_without_predictions_is_refused(lane: DeviceLane) -> None:
    with pytest.raises(ConfigError, match=r"the loss is 'nft', .* but MlpPolicy has none"):
        Learner(mlp(), lane, settings(NFT))
    with pytest.raises(ConfigError, match=r"kl\.estimator is 'exact'"):
        Learner(mlp(), lane, settings(EXACT))


async def test_a_ratio_of_decisions_without_noise_is_refused(
    policy: DrawingPolicy, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawingPolicy, "has_likelihood", False, raising=False)
    with pytest.raises(ConfigError, match="its noise level is 0"):
        Learner(policy, lane, LearnerConfig())
    Learner(policy, lane, settings(NFT))


def test_the_exact_divergence_of_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected next_state"):
        PolicyLossConfig(name="nft", predicts="actions", kl=EXACT.kl)
    with pytest.raises(ConfigError, match="negative_weight"):
        PolicyLossConfig(name="nft", form="dpo", negative_weight=0.2)
