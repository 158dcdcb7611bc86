"""Replies of the in-process engine: together or alone the same, joined and left, cut off, refused,
given up, and stamped.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.errors import ContextOverflow
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.types import Completion, Message, Sampling, ToolSpec

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)
TOOL = ToolSpec(name="add", description="Add.", parameters={"type": "object", "properties": {}})


def said(number: int) -> tuple[Message, ...]:
    return (Message(role="user", content="how many? " * (1 + number % 3) + str(number)),)


@pytest.fixture
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["how many? " * 5], seed=3)


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds."""
    while not condition():  # noqa: ASYNC110  # nothing of the engine's is there to wait on
        await asyncio.sleep(0)


async def replies(engine: TorchChatEngine, num: int) -> list[Completion]:
    samplings = [Sampling(seed=number, temperature=1.3) for number in range(num)]
    return await asyncio.gather(
        *(
            engine.generate(said(number), tools=(TOOL,), sampling=samplings[number])
            for number in range(num)
        )
    )


def log_probs_of(policy: CausalLanguageModel, reply: Completion, temperature: float) -> np.ndarray:
    batch = policy.prepare([{"prompt_tokens": reply.prompt_tokens}])
    found, _ = policy.log_probs(
        batch, torch.from_numpy(reply.tokens)[None], torch.tensor([temperature])
    )
    return found.detach().numpy()[0]


async def test_a_reply_does_not_depend_on_who_is_in_the_batch(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    found = []
    for config in (
        EngineConfig(is_deterministic=True, max_reply=12),
        EngineConfig(max_batch=3, max_reply=12, kept_conversations=2),
        EngineConfig(max_batch=16, max_reply=12, kept_conversations=0),
    ):
        async with TorchChatEngine(policy, lane, config) as engine:
            found.append(await replies(engine, 7))
    alone, *others = found
    for together in others:
        for one, other in zip(alone, together, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
            assert one.message == other.message


async def test_tool_calls_of_later_replies_have_ids_of_their_own(
    policy: CausalLanguageModel, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a model with random weights never calls a tool
    monkeypatch.setattr(
        policy, "decode", lambda tokens: '<tool_call>{"name": "add"}</tool_call>' * 2
    )
    conversation, ids = list(said(0)), []
    async with (
        asyncio.timeout(30),
        TorchChatEngine(policy, lane, EngineConfig(max_reply=2)) as engine,
    ):
        for _ in range(2):
            reply = await engine.generate(conversation, sampling=Sampling(seed=1))
            ids += [call.id for call in reply.message.tool_calls]
            answers = [
                Message(role="tool", content="1", tool_call_id=call.id)
                for call in reply.message.tool_calls
            ]
            conversation += [reply.message, *answers]
    assert ids == ["call_0", "call_1", "call_2", "call_3"]


async def test_log_probs_are_those_that_the_learner_finds(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(
        policy, lane, EngineConfig(max_reply=20), weight_version=4
    ) as engine:
        for reply in await replies(engine, 5):
            np.testing.assert_allclose(reply.log_probs, log_probs_of(policy, reply, 1.3), atol=1e-4)
            assert reply.weight_versions.tolist() == [4] * len(reply.tokens)
            assert reply.prompt_tokens.dtype == reply.tokens.dtype == np.int64


async def test_greedy_is_what_transformers_generates(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        reply = await engine.generate(said(0), sampling=Sampling(greedy=True), max_tokens=12)
    network: Any = policy.network
    prompt = torch.from_numpy(reply.prompt_tokens)[None]
    expected = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )
    assert reply.tokens.tolist() == expected[0, prompt.shape[1] :].tolist()


async def test_a_reply_ends_at_its_limit_or_at_a_stop_token(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig(max_reply=60)) as engine:
        short = await engine.generate(said(1), sampling=Sampling(seed=1), max_tokens=3)
        long = await asyncio.gather(
            *(
                engine.generate(said(1), sampling=Sampling(seed=seed, temperature=3.0))
                for seed in range(12)
            )
        )
    assert len(short.tokens) == 3
    assert short.finish_reason == "length"
    stopped = [reply for reply in long if reply.finish_reason == "stop"]
    assert stopped
    for reply in stopped:
        assert int(reply.tokens[-1]) in policy.stop_tokens
        assert not set(reply.tokens[:-1].tolist()) & policy.stop_tokens


async def test_a_prompt_that_fills_the_context_is_refused(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    num = len(policy.render(said(1)))
    async with TorchChatEngine(policy, lane, EngineConfig(max_context=num)) as engine:
        with pytest.raises(
            ContextOverflow,
            match=rf"the prompt has {num} tokens and the context {num}, expected room",
        ):
            await engine.generate(said(1))
    async with TorchChatEngine(policy, lane, EngineConfig(max_context=num + 2)) as engine:
        reply = await engine.generate(said(1), sampling=Sampling(seed=1))
        assert len(reply.tokens) <= 2


async def test_limits_that_allow_no_token_are_refused(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        with pytest.raises(ValueError, match="max_tokens is 0, expected at least 1"):
            await engine.generate(said(1), max_tokens=0)
        with pytest.raises(ValueError, match=r"temperature is 0.0, expected > 0"):
            await engine.generate(said(1), sampling=Sampling(temperature=0.0))
        with pytest.raises(ValueError, match=r"Sampling\.by_mean is True, expected False"):
            await engine.generate(said(1), sampling=Sampling(greedy=True, by_mean=True))


async def test_a_short_reply_leaves_before_a_long_one_that_came_first(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    ended: list[str] = []

    async def one(name: str, max_tokens: int) -> None:
        await engine.generate(said(2), sampling=Sampling(seed=5), max_tokens=max_tokens)
        ended.append(name)

    async with (
        TorchChatEngine(policy, lane, EngineConfig(max_batch=4)) as engine,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(one("long", 40))
        for _ in range(3):
            tasks.create_task(one("short", 2))
    assert ended == ["short", "short", "short", "long"]


async def test_who_gives_up_makes_room_for_the_next(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=1, max_reply=200)) as engine:
        first = asyncio.ensure_future(engine.generate(said(0), sampling=Sampling(seed=5)))
        second = asyncio.ensure_future(
            engine.generate(said(1), sampling=Sampling(seed=5), max_tokens=2)
        )
        await until(lambda: engine.stats().num_queued == 1)
        first.cancel()
        assert len((await second).tokens) <= 2
        assert first.cancelled()
        assert (await engine.generate(said(1), max_tokens=1)).finish_reason in ("length", "stop")


class CountingModel(CausalLanguageModel):
    """Counts the tokens that it reads; may be told to fail."""

    num_read = 0
    fails = False

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        if self.fails:
            raise RuntimeError("no memory is left")
        self.num_read += sum(map(len, tokens))
        return super().extend(memory, slots, starts, tokens)


@pytest.fixture
def counting(policy: CausalLanguageModel) -> CountingModel:
    return CountingModel(policy.network, policy._tokenizer, policy.checkpoint_files())


async def test_a_conversation_goes_on_without_reading_its_past_again(
    counting: CountingModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(counting, lane, EngineConfig(max_batch=2)) as engine:
        reply = await engine.generate(said(4), sampling=Sampling(seed=2), max_tokens=5)
        assert counting.num_read == len(reply.prompt_tokens) + len(reply.tokens) - 1
        before = counting.num_read
        again = (
            *said(4),
            Message(role="assistant", content="7"),
            Message(role="user", content="sure?"),
        )
        other = await engine.generate(again, sampling=Sampling(seed=3), max_tokens=1)
        shared = len(reply.prompt_tokens)
        assert other.prompt_tokens[:shared].tolist() == reply.prompt_tokens.tolist()
        assert counting.num_read - before <= len(other.prompt_tokens) - shared
    np.testing.assert_allclose(other.log_probs, log_probs_of(counting, other, 1.0), atol=1e-4)


async def test_an_error_of_the_model_reaches_who_waits_and_the_engine_goes_on(
    counting: CountingModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(counting, lane, EngineConfig(max_batch=2)) as engine:
        counting.fails = True
        with pytest.raises(RuntimeError, match="no memory is left"):
            await engine.generate(said(0), max_tokens=2)
        counting.fails = False
        assert (
            len((await engine.generate(said(0), sampling=Sampling(seed=1), max_tokens=2)).tokens)
            <= 2
        )


async def test_replies_end_with_an_error_where_the_lane_is_closed_under_the_engine(
    policy: CausalLanguageModel,
) -> None:
    lane, is_let_go = DeviceLane(num_threads=1), threading.Event()
    asked: list[asyncio.Future[Any]] = []

    async def close_the_lane_under_the_engine() -> None:
        async with (
            asyncio.timeout(60),
            TorchChatEngine(policy, lane, EngineConfig(max_batch=1)) as engine,
        ):
            asked.append(asyncio.ensure_future(lane.run(is_let_go.wait, 100.0)))
            asked.append(asyncio.ensure_future(engine.generate(said(0))))
            await until(lambda: engine.stats().num_batches == 1)
            asked.append(asyncio.ensure_future(lane.close()))
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        await close_the_lane_under_the_engine()
    is_let_go.set()
    holding, reply, closing = asked
    await asyncio.gather(holding, closing)
    with pytest.raises(
        RuntimeError, match="replies were lost: the device lane cancelled its work"
    ) as caught:
        await reply
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_tokens_after_an_update_are_chosen_by_the_new_weights_from_the_whole_past(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    newer = policy.copy()
    with torch.no_grad():
        for parameter in newer.network.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    older = policy.copy()
    async with TorchChatEngine(
        policy, lane, EngineConfig(max_batch=2, max_reply=64), weight_version=1
    ) as engine:
        waiting = asyncio.ensure_future(
            engine.generate(said(0), sampling=Sampling(seed=11, temperature=1.3))
        )
        await until(lambda: engine.stats().num_batches >= 2)
        await lane.run(engine.apply_weights, newer.network, 2)
        reply = await waiting
    versions = reply.weight_versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    is_new = reply.weight_versions == 2
    np.testing.assert_allclose(
        reply.log_probs[is_new], log_probs_of(newer, reply, 1.3)[is_new], atol=1e-4
    )
    np.testing.assert_allclose(
        reply.log_probs[~is_new], log_probs_of(older, reply, 1.3)[~is_new], atol=1e-4
    )


async def test_who_waits_when_the_engine_closes_is_told(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=1, max_reply=200)) as engine:
        waiting = [asyncio.ensure_future(engine.generate(said(number))) for number in range(3)]
        await until(lambda: engine.stats().num_queued == 2)
    for each in waiting:
        with pytest.raises(RuntimeError, match="the engine is not open"):
            await each
    with pytest.raises(RuntimeError, match="the engine is not open"):
        await engine.generate(said(0))
