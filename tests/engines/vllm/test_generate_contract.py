"""What an engine that speaks promises, whichever it is: the same tests on the torch engine and on vLLM."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from small_policies import moved, speaking_policy

from vla_rl.engines import DeviceLane, EngineConfig, TorchEngine
from vla_rl.engines.vllm import VllmEngine
from vla_rl.errors import ContextOverflow
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.serving import serve
from vla_rl.types import Completion, Message, Sampling, ToolSpec

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs_vllm,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

TOLERANCE = 1e-5
MAX_REPLY = 24
ASKED = (Message(role="user", content="what is 3 plus 4"),)


class Speaking:
    """An open engine, and the policy whose weights it has now."""

    def __init__(self, engine: Any, lane: DeviceLane, policy: CausalLanguageModel) -> None:
        self.engine, self.lane, self.first, self.policy = engine, lane, policy, policy

    async def publish(self, policy: CausalLanguageModel, version: int) -> None:
        await self.lane.run(self.engine.adopt, policy.network, version)
        self.policy = policy

    async def say(self, messages: tuple[Message, ...] = ASKED, **sampling: Any) -> Completion:
        completion: Completion = await self.engine.generate(messages, sampling=Sampling(**sampling))
        return completion

    def gap(self, completion: Completion, temperature: float = 1.0) -> float:
        return gap(self.policy, completion, temperature)


def gap(policy: CausalLanguageModel, completion: Completion, temperature: float, begin: int = 0) -> float:
    """Largest difference from the learner's log-probs, from token `begin` of the reply on."""
    batch = policy.prepare([{"prompt_tokens": completion.prompt_tokens}])
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(batch, torch.from_numpy(completion.tokens)[None], torch.tensor([temperature]))
    return float((log_probs[0] - torch.from_numpy(completion.log_probs)).abs()[begin:].max())


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch", "vllm"])
async def speaking(request: pytest.FixtureRequest) -> AsyncIterator[Speaking]:
    policy = speaking_policy()
    config = EngineConfig(max_reply=MAX_REPLY)
    async with DeviceLane(1) as lane:
        make: Any = (
            (lambda: TorchEngine(policy.copy(), lane, config))
            if request.param == "torch"
            else (lambda: VllmEngine(serve(policy), lane, config))
        )
        async with make() as engine:
            yield Speaking(engine, lane, policy)


async def test_a_reply_is_a_message_with_its_tokens_log_probs_and_versions(speaking: Speaking) -> None:
    completion = await speaking.say(seed=1)
    policy, length = speaking.policy, len(completion.tokens)
    assert 1 <= length <= MAX_REPLY
    assert completion.tokens.dtype == np.int64
    assert (completion.log_probs.shape, completion.log_probs.dtype) == ((length,), np.float32)
    assert completion.weight_versions.tolist() == [0] * length
    np.testing.assert_array_equal(completion.prompt_tokens, policy.render(ASKED))
    assert completion.message == policy.parse(completion.tokens)
    ended = completion.tokens[-1] in policy.stop_tokens
    assert completion.finish_reason == ("stop" if ended else "length")
    assert ended or length == MAX_REPLY


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.5])
async def test_log_probs_are_those_of_the_learner_after_temperature(speaking: Speaking, temperature: float) -> None:
    completions = await asyncio.gather(*(speaking.say(seed=seed, temperature=temperature) for seed in range(4)))
    assert max(speaking.gap(completion, temperature) for completion in completions) < TOLERANCE
    greedy = await speaking.say(greedy=True, temperature=temperature)
    assert speaking.gap(greedy, temperature) < TOLERANCE


async def test_the_same_seed_gives_the_same_reply(speaking: Speaking) -> None:
    first, second, other = [await speaking.say(seed=seed) for seed in (4, 4, 5)]
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert first.tokens.tolist() != other.tokens.tolist()


async def test_a_conversation_goes_on_from_what_was_said(speaking: Speaking) -> None:
    first = await speaking.say(seed=2)
    longer = (*ASKED, first.message, Message(role="user", content="and 5"))
    second = await speaking.say(longer, seed=3)
    np.testing.assert_array_equal(second.prompt_tokens, speaking.policy.render(longer))
    assert speaking.gap(second) < TOLERANCE


async def test_tools_are_part_of_the_prompt(speaking: Speaking) -> None:
    tool = ToolSpec(name="add", description="adds", parameters={"type": "object"})
    completion = await speaking.engine.generate(ASKED, tools=(tool,), sampling=Sampling(), max_tokens=2)
    np.testing.assert_array_equal(completion.prompt_tokens, speaking.policy.render(ASKED, (tool,)))
    assert len(completion.tokens) <= 2


async def test_a_prompt_without_room_for_a_reply_is_refused(speaking: Speaking) -> None:
    with pytest.raises(ContextOverflow, match="the context 256"):
        await speaking.say((Message(role="user", content="1 " * 300),))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        await speaking.engine.generate(ASKED, max_tokens=0)


async def test_a_cancelled_reply_is_given_up(speaking: Speaking) -> None:
    saying = asyncio.create_task(speaking.say(seed=1))
    await asyncio.sleep(0)
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert speaking.gap(await speaking.say(seed=1)) < TOLERANCE


async def test_an_engine_that_speaks_does_not_act(speaking: Speaking) -> None:
    with pytest.raises(TypeError, match="use `generate`"):
        await speaking.engine.act({})


async def test_replies_that_run_go_on_with_new_weights_and_every_token_names_its_own(speaking: Speaking) -> None:
    """What a token was sampled from is the network of its version, over a conversation read by that network alone."""
    by_version = {5: moved(speaking.first, 1), 6: moved(speaking.first, 2)}
    replies: list[Completion] = []
    another, is_over = asyncio.Condition(), asyncio.Event()

    def have_enough(version: int) -> bool:
        return sum(version in reply.weight_versions for reply in replies) >= 8

    async def talk(number: int) -> None:
        while not is_over.is_set():
            reply = await speaking.say(seed=len(replies) * 8 + number, temperature=1.0)
            async with another:
                replies.append(reply)
                another.notify()

    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(talk(number))
        for version, policy in by_version.items():
            await speaking.publish(policy, version)
            async with another:
                await another.wait_for(partial(have_enough, version))
        is_over.set()
    networks = {0: speaking.first, **by_version}
    assert {int(version) for reply in replies for version in reply.weight_versions} >= {5, 6}
    for reply in replies:
        assert (np.diff(reply.weight_versions) >= 0).all()
        newest = int(reply.weight_versions[-1])
        begin = int(np.argmax(reply.weight_versions == newest))
        assert gap(networks[newest], reply, 1.0, begin) < TOLERANCE
