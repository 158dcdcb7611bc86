"""What several prompts begin with is read once, and never taken from older weights."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.engines.shared_beginnings import WORTH_A_PASS, Copy, plan_reading
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.types import Completion, Message, Sampling

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)
TEMPERATURE = 1.3


class RecordingModel(CausalLanguageModel):
    """Records how many tokens of each conversation it reads in each pass."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.passes: list[list[int]] = []

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        self.passes.append([len(row) for row in tokens])
        return super().extend(memory, slots, starts, tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens read so far in rows of more than one, as those of prompts are."""
        return sum(length for read in self.passes for length in read if length > 1)


@pytest.fixture
def policy() -> RecordingModel:
    made = tiny(SHAPE, ["how many? " * 5], seed=3)
    return RecordingModel(made.network, made._tokenizer, made.checkpoint_files())


def question(text: str, system: str = "") -> tuple[Message, ...]:
    head = (Message(role="system", content=system),) if system else ()
    return (*head, Message(role="user", content=text))


async def ask(
    engine: TorchChatEngine, messages: Sequence[Message], seed: int, **fields: Any
) -> Completion:
    return await engine.generate(
        messages, sampling=Sampling(seed=seed, temperature=TEMPERATURE), **fields
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nothing of the engine's is there to wait on
        await asyncio.sleep(0)


def learner_log_probs(policy: CausalLanguageModel, reply: Completion) -> np.ndarray:
    batch = policy.prepare([{"prompt_tokens": reply.prompt_tokens}])
    temperatures = torch.tensor([TEMPERATURE])
    found, _ = policy.log_probs(batch, torch.from_numpy(reply.tokens)[None], temperatures)
    log_probs: np.ndarray = found.detach().numpy()[0]
    return log_probs


def moved(policy: CausalLanguageModel) -> CausalLanguageModel:
    """Return the policy with weights that give clearly other log-probs."""
    other, draw = policy.copy(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return other


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_equal_prompts_wait_for_the_first_and_copy_all_but_its_last_token() -> None:
    prompt = tokens(1, 2, 3, 4)
    plan = plan_reading([prompt, prompt, tokens(7, 8), prompt], [0, 0, 0, 0])
    assert plan.reads == [0, 2]
    assert plan.copies == {1: Copy(0, 3), 3: Copy(0, 3)}


def test_a_prompt_that_begins_a_longer_one_copies_from_it() -> None:
    plan = plan_reading([tokens(1, 2, 3), tokens(1, 2, 3, 4, 5)], [0, 0])
    assert plan.reads == [1]
    assert plan.copies == {0: Copy(1, 2)}


def test_a_common_beginning_is_read_first_only_if_it_saves_a_pass() -> None:
    def prompts(length: int) -> list[np.ndarray]:
        common = np.arange(length)
        return [np.append(common, number) for number in (900, 901, 900, 902)]

    short, long = WORTH_A_PASS // 2 - 1, WORTH_A_PASS // 2
    # the last token never counts, so these differ in their last two
    few = [np.append(prompt, 999) for prompt in prompts(short)]
    many = [np.append(prompt, 999) for prompt in prompts(long)]
    assert plan_reading(few, [0] * 4).reads == [0, 1, 3]
    assert plan_reading(few, [0] * 4).copies == {2: Copy(0, short + 1)}
    plan = plan_reading(many, [0] * 4)
    assert plan.reads == [0]
    assert plan.copies == {1: Copy(0, long), 2: Copy(0, long + 1), 3: Copy(0, long)}
    # once these are held, nothing is left to wait for
    assert plan_reading([many[1], many[3]], [long, long]).reads == [0, 1]


def test_what_waits_for_one_that_waits_is_planned_after_it() -> None:
    common, one, other = np.arange(WORTH_A_PASS), tokens(900, 999), tokens(901, 999)
    prompts = [np.append(common, rest) for rest in (one, other, other)]
    plan = plan_reading(prompts, [0, 0, 0])
    assert plan.reads == [0]
    assert plan.copies == {1: Copy(0, WORTH_A_PASS)}
    assert plan_reading(prompts[1:], [WORTH_A_PASS, 0]).copies == {1: Copy(0, WORTH_A_PASS + 1)}


async def test_the_prompt_of_a_group_is_computed_once(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    alone = EngineConfig(is_deterministic=True, max_reply=10)
    together = EngineConfig(max_batch=8, max_reply=10, kept_conversations=0)
    asked = question("how many?")
    found = []
    for config in (alone, together):
        policy.passes.clear()
        async with TorchChatEngine(policy, lane, config) as engine:
            found.append(await asyncio.gather(*(ask(engine, asked, seed) for seed in range(8))))
            share = engine.metrics()["engine/prompt_share_reused"]
        num = len(found[-1][0].prompt_tokens)
        assert policy.num_prompt_tokens == (8 * num if config is alone else num)
        assert share == (0.0 if config is alone else pytest.approx(7 * (num - 1) / (8 * num)))
    for one, other in zip(*found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        np.testing.assert_allclose(other.log_probs, learner_log_probs(policy, other), atol=1e-5)


async def test_members_that_come_late_copy_from_those_that_run_or_have_ended(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    asked = question("how many?")
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=2, max_reply=30)) as engine:
        running = asyncio.ensure_future(ask(engine, asked, 0))
        await until(lambda: engine.stats().num_batches >= 2)
        late = [await ask(engine, asked, seed) for seed in (1, 2)]
        late.append(await running)
        late.append(await ask(engine, asked, 3))
    assert policy.num_prompt_tokens == len(late[0].prompt_tokens)
    for reply in late:
        np.testing.assert_allclose(reply.log_probs, learner_log_probs(policy, reply), atol=1e-5)


async def test_a_group_larger_than_the_batch_is_still_computed_once(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    asked = question("how many?")
    config = EngineConfig(max_batch=3, max_reply=12, kept_conversations=1)
    async with TorchChatEngine(policy, lane, config) as engine:
        replies = await asyncio.gather(*(ask(engine, asked, seed) for seed in range(8)))
    assert policy.num_prompt_tokens == len(replies[0].prompt_tokens)
    for reply in replies:
        np.testing.assert_allclose(reply.log_probs, learner_log_probs(policy, reply), atol=1e-5)


async def test_members_that_come_after_an_update_never_use_keys_of_old_weights(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    older, newer = policy.copy(), moved(policy)
    asked = question("how many?")
    config = EngineConfig(max_batch=4, max_reply=40)
    async with TorchChatEngine(policy, lane, config, weight_version=1) as engine:
        ended = await ask(engine, asked, 9, max_tokens=1)
        running = [asyncio.ensure_future(ask(engine, asked, seed)) for seed in range(2)]
        await until(lambda: engine.stats().num_batches >= 3)
        await lane.run(engine.apply_weights, newer.network, 2)
        late = [asyncio.ensure_future(ask(engine, asked, seed)) for seed in (4, 5)]
        replies = await asyncio.gather(*running, *late)
    assert all(set(reply.weight_versions.tolist()) == {1, 2} for reply in replies[:2])
    assert all(set(reply.weight_versions.tolist()) == {2} for reply in replies[2:])
    for reply in (ended, *replies):
        is_new = reply.weight_versions == 2
        expected = np.where(
            is_new, learner_log_probs(newer, reply), learner_log_probs(older, reply)
        )
        np.testing.assert_allclose(reply.log_probs, expected, atol=1e-5)


async def test_running_members_read_their_prompt_again_once_after_an_update(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    newer, asked = moved(policy), question("how many?" * 6)
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=4, max_reply=40)) as engine:
        running = [asyncio.ensure_future(ask(engine, asked, seed)) for seed in range(4)]
        await until(lambda: engine.stats().num_batches >= 2)
        before = policy.num_prompt_tokens
        await lane.run(engine.apply_weights, newer.network, 1)
        replies = await asyncio.gather(*running)
    num, said = len(replies[0].prompt_tokens), sum(len(reply.tokens) for reply in replies)
    assert num <= policy.num_prompt_tokens - before < num + said


async def test_a_member_that_gives_up_leaves_the_others_right(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    asked = question("how many?")
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=2, max_reply=40)) as engine:
        members = [asyncio.ensure_future(ask(engine, asked, seed)) for seed in range(5)]
        await until(lambda: engine.stats().num_batches >= 2)
        members[0].cancel()
        members[3].cancel()
        found = await asyncio.gather(*members, return_exceptions=True)
    replies = [each for each in found if isinstance(each, Completion)]
    assert len(replies) >= 3
    assert policy.num_prompt_tokens == len(replies[0].prompt_tokens)
    for reply in replies:
        np.testing.assert_allclose(reply.log_probs, learner_log_probs(policy, reply), atol=1e-5)


async def test_one_system_prompt_is_read_once_for_all_questions(
    policy: RecordingModel, lane: DeviceLane
) -> None:
    system = "answer in one word. " * 12
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=4, max_reply=6)) as engine:
        replies = await asyncio.gather(
            *(
                ask(engine, question(text, system), seed)
                for seed, text in enumerate(("red?", "blue?", "red?", "big?"))
            )
        )
        assert engine.metrics()["engine/prompt_share_reused"] > 0.6
    assert policy.num_prompt_tokens < sum(len(reply.prompt_tokens) for reply in replies) / 2
    for reply in replies:
        np.testing.assert_allclose(reply.log_probs, learner_log_probs(policy, reply), atol=1e-5)
