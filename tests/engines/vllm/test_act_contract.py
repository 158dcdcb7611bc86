"""What an engine that acts promises, whichever it is: the same tests on the torch engine and on
vLLM, for both policies.

The learner's own network is the oracle: every log-prob that an engine reports is recomputed by it,
in float32.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from acting_team import BEGINNING, OneEngine
from small_policies import log_prob_gap, moved, observe, oft_policy, token_policy

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.engines.vllm import VllmActionEngine, VllmConfig
from vla_rl.errors import CheckpointError
from vla_rl.models.vllm import serve
from vla_rl.rollout.engines import require_chat_engine
from vla_rl.types import ActionChunk, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.needs_vllm,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

TOLERANCE = 1e-5
"""Largest difference of a log-prob between an engine and the learner, natural logs, float32."""


class Acting:
    """An open engine, what opened it, and the policy whose weights it has now."""

    def __init__(self, engine: Any, lane: DeviceLane, policy: Any) -> None:
        self.engine, self.lane, self.first = engine, lane, policy
        self.policy = policy

    async def publish(self, policy: Any, version: int) -> None:
        """Give the engine other weights, as a learner does."""
        await self.lane.run(self.engine.apply_weights, policy.network, version)
        self.policy = policy

    async def act(self, number: int, **sampling: Any) -> ActionChunk:
        chunk: ActionChunk = await self.engine.act(observe(number), Sampling(**sampling))
        return chunk

    def gap(self, number: int, chunk: ActionChunk, temperature: float = 1.0) -> float:
        return log_prob_gap(self.policy, observe(number), chunk, temperature)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[
        *("torch oft", "torch tokens", "vllm tokens"),
        # in the suite, test_recipes.py starts an engine of this policy
        *(
            pytest.param(kind, marks=pytest.mark.proof)
            for kind in ("vllm oft", "vllm tokens keep", "vllm tokens restart")
        ),
    ],
)
async def acting(request: pytest.FixtureRequest, one_engine: OneEngine) -> AsyncIterator[Acting]:
    if request.param == "vllm tokens":
        team = await one_engine.opened()
        yield Acting(team.engine, team.lane, team.newer)
        await team.publish(team.newer, BEGINNING)
        return
    kind, family, *update_mode = request.param.split()
    policy: Any = oft_policy() if family == "oft" else token_policy()
    config = EngineConfig(
        vllm=VllmConfig(update_mode=update_mode[0] if update_mode else None, verify_checksums=True)
    )
    async with DeviceLane(1) as lane:
        make: Any = (
            (lambda: TorchActionEngine(policy.copy(), lane, config, BEGINNING))
            if kind == "torch"
            else (lambda: VllmActionEngine(serve(policy), lane, config, BEGINNING))
        )
        async with make() as engine:
            yield Acting(engine, lane, policy)


async def test_a_decision_is_a_chunk_with_its_tokens_log_probs_and_version(acting: Acting) -> None:
    chunk = await acting.act(0, seed=1)
    num_tokens = {"OpenVlaOft": 56, "OpenVla": 7}[type(acting.policy).__name__]
    assert (chunk.actions.shape, chunk.actions.dtype) == ((num_tokens // 7, 7), np.float32)
    assert (chunk.tokens.shape, chunk.tokens.dtype) == ((num_tokens,), np.int64)
    assert (chunk.log_probs.shape, chunk.log_probs.dtype) == ((num_tokens,), np.float32)
    assert chunk.weight_version == acting.engine.weight_version == BEGINNING
    np.testing.assert_array_equal(acting.policy.decode(chunk.tokens[None])[0], chunk.actions)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_log_probs_are_those_of_the_learner_after_temperature(
    acting: Acting, temperature: float
) -> None:
    for seed in range(4):
        chunk = await acting.act(seed, temperature=temperature, seed=seed)
        assert acting.gap(seed, chunk, temperature) < TOLERANCE


async def test_greedy_takes_the_most_likely_tokens_and_scores_them_at_the_temperature(
    acting: Acting,
) -> None:
    policy = acting.policy
    with torch.inference_mode():
        best, _ = policy.sample(policy.prepare([observe(2)]), [Sampling(greedy=True)])
    for temperature in (1.0, 1.6):
        chunk = await acting.act(2, greedy=True, temperature=temperature, seed=5)
        np.testing.assert_array_equal(chunk.tokens, best[0].numpy())
        assert acting.gap(2, chunk, temperature) < TOLERANCE


async def test_the_same_seed_gives_the_same_chunk_whoever_is_asked_beside_it(
    acting: Acting,
) -> None:
    alone = [await acting.act(seed, seed=seed) for seed in range(6)]
    together = await asyncio.gather(*(acting.act(seed, seed=seed) for seed in range(6)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=TOLERANCE)
    another = await acting.act(0, seed=123)
    assert (another.tokens != alone[0].tokens).any()


async def test_samples_follow_the_distribution(acting: Acting) -> None:
    """Mean of -log p over draws is the entropy: 24 draws of every token, compared within four
    standard errors.
    """
    chunks = await asyncio.gather(*(acting.act(0, seed=seed) for seed in range(24)))
    policy = acting.policy
    # the first token: the same distribution in every draw
    drawn = np.array([-chunk.log_probs[0] for chunk in chunks])
    with torch.inference_mode():
        _, entropies = policy.log_probs(
            policy.prepare([observe(0)]),
            torch.from_numpy(chunks[0].tokens)[None],
            torch.tensor([1.0]),
        )
    assert (
        abs(drawn.mean() - float(entropies[0, 0])) < 4.0 * drawn.std() / np.sqrt(len(drawn)) + 1e-3
    )


async def test_an_observation_that_does_not_fit_fails_its_caller_and_nobody_else(
    acting: Acting,
) -> None:
    wrong = observe(0) | {"image": np.zeros((4, 4, 4), np.uint8)}
    with pytest.raises(ValueError, match=r"observation\['image'\]"):
        await acting.engine.act(wrong, Sampling())
    with pytest.raises(ValueError, match=r"Sampling\.temperature is 0"):
        await acting.act(0, temperature=0.0)
    assert acting.gap(0, await acting.act(0, seed=1)) < TOLERANCE


async def test_a_cancelled_decision_is_given_up(acting: Acting) -> None:
    asking = asyncio.create_task(acting.act(1, seed=1))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert acting.gap(1, await acting.act(1, seed=1)) < TOLERANCE


async def test_an_engine_that_acts_does_not_speak(acting: Acting) -> None:
    with pytest.raises(TypeError, match="use `act`"):
        require_chat_engine(acting.engine)


async def test_new_weights_act_from_their_publication_on(acting: Acting) -> None:
    first = acting.first
    for version, policy in ((7, moved(first, 1)), (8, moved(first, 2)), (9, first)):
        await acting.publish(policy, version)
        assert acting.engine.weight_version == version
        for seed in range(2):
            chunk = await acting.act(seed, seed=seed)
            assert chunk.weight_version == version
            assert acting.gap(seed, chunk) < TOLERANCE


async def test_no_chunk_mixes_versions_while_weights_change_under_traffic(acting: Acting) -> None:
    by_version = {20: moved(acting.first, 1), 21: moved(acting.first, 2), 22: acting.first}
    answers: list[tuple[int, ActionChunk]] = []
    is_over, answered = asyncio.Event(), asyncio.Event()

    async def ask(seed: int) -> None:
        while not is_over.is_set():
            answers.append((seed, await acting.act(seed, seed=len(answers))))
            answered.set()

    async with asyncio.TaskGroup() as tasks:
        for seed in range(6):
            tasks.create_task(ask(seed))
        for version, policy in by_version.items():
            await acting.publish(policy, version)
            while sum(chunk.weight_version == version for _, chunk in answers) < 6:
                answered.clear()
                await answered.wait()
        is_over.set()
    later = [(seed, chunk) for seed, chunk in answers if chunk.weight_version >= 20]
    assert {chunk.weight_version for _, chunk in later} == {20, 21, 22}
    for seed, chunk in later:
        assert log_prob_gap(by_version[chunk.weight_version], observe(seed), chunk, 1.0) < TOLERANCE


async def test_weights_of_another_policy_are_refused_and_nothing_is_applied(acting: Acting) -> None:
    if isinstance(acting.engine, TorchActionEngine):
        pytest.skip("shares its process and its network's shape with the learner")
    version = acting.engine.weight_version
    missing = acting.first.copy()
    del missing.network.projector.fc2
    misshapen = acting.first.copy()
    misshapen.network.projector.fc2.bias = torch.nn.Parameter(torch.zeros(3))
    for broken, message in (
        (missing, "2 missing"),
        (misshapen, r"fc2.bias is torch.float32 \[3\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            await acting.lane.run(acting.engine.apply_weights, broken.network, version + 1)
    assert acting.engine.weight_version == version
    chunk = await acting.act(0, seed=1)
    assert chunk.weight_version == version
    assert acting.gap(0, chunk) < TOLERANCE


async def test_checksums_tell_weights_apart(acting: Acting) -> None:
    if isinstance(acting.engine, TorchActionEngine):
        pytest.skip("has the learner's own tensors")
    (before,) = (await acting.engine.checksums()).values()
    await acting.publish(moved(acting.first, 5), 30)
    (between,) = (await acting.engine.checksums()).values()
    await acting.publish(acting.first, 31)
    (after,) = (await acting.engine.checksums()).values()
    assert before == after != between


async def test_pause_and_whole_time_of_an_update_are_reported_apart(acting: Acting) -> None:
    if isinstance(acting.engine, TorchActionEngine):
        pytest.skip("publishes in no time")
    times = acting.engine.update_times[-1]
    assert 0.0 < times.pause_s < times.total_s < 30.0
    assert times.total_s == pytest.approx(times.stage_s + times.pause_s)
