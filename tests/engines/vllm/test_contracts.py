"""What an engine that acts or replies promises, whichever it is: the same tests on the torch engine as on vLLM,
for both policies that act.

The learner's own network is the oracle: every log-prob that an engine reports is recomputed by it,
in float32. More of replies is in test_generate_contract.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from acting_team import BEGINNING, OneEngine
from small_policies import completing_policy, log_prob_gap, moved, observe, oft_policy, token_policy

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.engines.vllm import VllmActionEngine, VllmChatEngine, VllmConfig
from vla_rl.errors import CheckpointError
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.rollout.engines import require_chat_engine
from vla_rl.testing import ActionEngineContract, ChatEngineContract, OpenEngine
from vla_rl.types import ActionChunk, Observation, Sampling

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


in_shared_loop = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-5
"""Largest difference of a log-prob between an engine and the learner, natural logs, float32."""


class TestVllmChatEngine(ChatEngineContract):
    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[VllmChatEngine]:
        config = EngineConfig(max_reply=self.max_reply)
        async with (
            DeviceLane(1) as lane,
            VllmChatEngine(serve(self.make_policy()), lane, config) as engine,
        ):
            yield engine


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
        # in the suite, test_engines_page.py starts an engine of this policy
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


class TestEngines(ActionEngineContract):
    """Each engine keeps the rules that one of your own has to keep."""

    @pytest_asyncio.fixture(loop_scope="session")
    async def opened(self, acting: Acting) -> OpenEngine:
        run = asyncio.get_running_loop().run_until_complete
        return OpenEngine(acting.engine, run, acting.policy, acting.publish)

    def make_observation(self, number: int) -> Observation:
        return observe(number)


@in_shared_loop
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


@in_shared_loop
async def test_an_observation_that_does_not_fit_fails_its_caller_and_nobody_else(
    acting: Acting,
) -> None:
    wrong = observe(0) | {"image": np.zeros((4, 4, 4), np.uint8)}
    with pytest.raises(ValueError, match=r"observation\['image'\]"):
        await acting.engine.act(wrong, Sampling())
    with pytest.raises(ValueError, match=r"Sampling\.temperature is 0"):
        await acting.act(0, temperature=0.0)
    assert acting.gap(0, await acting.act(0, seed=1)) < TOLERANCE


@in_shared_loop
async def test_an_engine_that_acts_does_not_speak(acting: Acting) -> None:
    with pytest.raises(TypeError, match="use `act`"):
        require_chat_engine(acting.engine)


@in_shared_loop
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


@in_shared_loop
async def test_checksums_tell_weights_apart(acting: Acting) -> None:
    if isinstance(acting.engine, TorchActionEngine):
        pytest.skip("has the learner's own tensors")
    (before,) = (await acting.engine.checksums()).values()
    await acting.publish(moved(acting.first, 5), 30)
    (between,) = (await acting.engine.checksums()).values()
    await acting.publish(acting.first, 31)
    (after,) = (await acting.engine.checksums()).values()
    assert before == after != between


@in_shared_loop
async def test_pause_and_whole_time_of_an_update_are_reported_apart(acting: Acting) -> None:
    if isinstance(acting.engine, TorchActionEngine):
        pytest.skip("publishes in no time")
    times = acting.engine.update_times[-1]
    assert 0.0 < times.pause_s < times.total_s < 30.0
    assert times.total_s == pytest.approx(times.stage_s + times.pause_s)
