"""Rules that an engine has to keep, as tests to inherit.

    ActionEngineContract   an engine that chooses action chunks
    ChatEngineContract     an engine that generates replies

The learner's own network is the oracle: each log-prob of an engine is computed again by the policy whose
weights it names, so that an engine that lags, or computes a little differently, cannot pass.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.engines import PolicyModel
from vla_rl.errors import ContextOverflow
from vla_rl.testing.policies import move_weights, score
from vla_rl.types import (
    ActionChunk,
    Completion,
    Message,
    Observation,
    Sampling,
    ToolSpec,
    with_drawn,
)


class OpenEngine:
    """An engine that the tests of one class share, because some take ten seconds to start.

    Args:
        engine: an `ActionEngine` or a `ChatEngine`.
        run_in_loop: runs a coroutine in the engine's event loop.
        policy: the policy whose weights the engine has now.
        publish: `publish(policy, version)` gives the engine other weights.
        deadline_s: for each test; an engine that never answers would hold up the others.
    """

    def __init__(
        self,
        engine: Any,
        run_in_loop: Callable[[Coroutine[Any, Any, Any]], Any],
        policy: Any,
        publish: Callable[[Any, int], Awaitable[None]],
        deadline_s: float = 60.0,
    ) -> None:
        self.engine, self.policy, self.deadline_s = engine, policy, deadline_s
        self._run_in_loop, self._publish = run_in_loop, publish

    def run(self, asking: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the engine's event loop. Raises: TimeoutError after the deadline."""

        async def run_in_time() -> Any:
            async with asyncio.timeout(self.deadline_s):
                return await asking

        return self._run_in_loop(run_in_time())

    async def publish(self, policy: Any, version: int) -> None:
        """Give the engine the weights of a policy."""
        await self._publish(policy, version)
        self.policy = policy


class EngineContract:
    """Shared parts of the contracts of both kinds of engine."""

    tolerance: ClassVar[float] = 1e-5
    """Largest difference between a log-prob of the engine and the learner's, in natural logs."""

    deadline_s: ClassVar[float] = 60.0

    def make_policy(self) -> Any:
        """Make the policy whose weights the engine has when it is opened."""
        raise NotImplementedError

    def open_engine(self) -> AbstractAsyncContextManager[Any]:
        """Return the engine to enter, with weights of version 0."""
        raise NotImplementedError

    async def publish(self, engine: Any, policy: Any, version: int) -> None:
        """Give the engine the weights of a policy; a test of new weights is skipped without it."""
        pytest.skip("the contract does not say how weights are published")

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls) -> Iterator[OpenEngine]:
        contract = cls()
        closing = asyncio.Event()

        async def hold(ready: "asyncio.Future[Any]") -> None:
            # Entered and left in one task, because task groups inside an engine insist on that.
            async with contract.open_engine() as engine:
                ready.set_result(engine)
                await closing.wait()

        async def start() -> tuple[Any, "asyncio.Task[None]"]:
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            holder = asyncio.create_task(hold(ready), name="contract's engine")
            await asyncio.wait([ready, holder], return_when=asyncio.FIRST_COMPLETED)
            if holder.done():
                await holder  # raises why the engine did not open
            return await ready, holder

        async def stop(holder: "asyncio.Task[None]") -> None:
            closing.set()
            await holder

        with asyncio.Runner() as runner:
            engine, holder = runner.run(start())

            async def publish(policy: Any, version: int) -> None:
                await contract.publish(engine, policy, version)

            yield OpenEngine(
                engine, runner.run, contract.make_policy(), publish, contract.deadline_s
            )
            runner.run(stop(holder))


class ActionEngineContract(EngineContract):
    """Rules of an engine that acts. Overwrite `make_policy`, `open_engine`, `make_observation`."""

    def make_observation(self, number: int) -> Observation:
        """Make one of many observations, by number."""
        raise NotImplementedError

    async def act(self, opened: OpenEngine, number: int, **sampling: Any) -> ActionChunk:
        chunk: ActionChunk = await opened.engine.act(
            self.make_observation(number), Sampling(**sampling)
        )
        return chunk

    def gap(
        self, policy: PolicyModel[Any], number: int, chunk: ActionChunk, temperature: float = 1.0
    ) -> float:
        """Return how far the engine's log-probs are from those of a policy, at most."""
        batch = policy.prepare([with_drawn(self.make_observation(number), chunk.drawn)])
        found, _ = score(policy, batch, torch.from_numpy(chunk.tokens)[None], temperature)
        return float((found[0] - torch.from_numpy(chunk.log_probs)).abs().max())

    def test_a_decision_is_a_chunk_with_its_tokens_log_probs_and_version(
        self, opened: OpenEngine
    ) -> None:
        chunk = opened.run(self.act(opened, 0, seed=1))
        assert (chunk.actions.ndim, chunk.actions.dtype) == (2, np.float32)
        assert chunk.tokens.ndim == 1
        assert chunk.tokens.dtype in (np.int64, np.float32)
        assert (chunk.log_probs.shape, chunk.log_probs.dtype) == (chunk.tokens.shape, np.float32)
        assert chunk.weight_version == opened.engine.weight_version
        if chunk.drawn is None:  # else the tokens may be a state on the way to the actions
            decoded = opened.policy.decode(chunk.tokens[None])[0]
            np.testing.assert_array_equal(decoded, chunk.actions)

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
    def test_log_probs_are_those_of_the_learner_after_temperature(
        self, opened: OpenEngine, temperature: float
    ) -> None:
        for seed in range(4):
            chunk = opened.run(self.act(opened, seed, temperature=temperature, seed=seed))
            assert self.gap(opened.policy, seed, chunk, temperature) < self.tolerance

    def test_greedy_takes_the_most_likely_tokens_and_scores_them_at_the_temperature(
        self, opened: OpenEngine
    ) -> None:
        policy = opened.policy
        with torch.inference_mode():
            batch = policy.prepare([self.make_observation(2)])
            best = policy.sample(batch, [Sampling(greedy=True, seed=5)]).tokens
        for temperature in (1.0, 1.6):
            chunk = opened.run(self.act(opened, 2, greedy=True, temperature=temperature, seed=5))
            np.testing.assert_array_equal(chunk.tokens, best[0].numpy())
            assert self.gap(policy, 2, chunk, temperature) < self.tolerance

    def test_means_of_tokens_are_the_policys_own_or_refused(self, opened: OpenEngine) -> None:
        policy = opened.policy
        if not getattr(policy, "has_token_means", False):
            with pytest.raises(ValueError, match=r"Sampling\.by_mean"):
                opened.run(self.act(opened, 2, greedy=True, by_mean=True))
            return
        for temperature in (0.5, 1.6):
            sampling = Sampling(greedy=True, by_mean=True, temperature=temperature)
            with torch.inference_mode():
                batch = policy.prepare([self.make_observation(2)])
                expected = policy.sample(batch, [sampling]).tokens
            chunk = opened.run(self.act(opened, 2, **msgspec.structs.asdict(sampling)))
            np.testing.assert_array_equal(chunk.tokens, expected[0].numpy())
            assert self.gap(policy, 2, chunk, temperature) < self.tolerance

    def test_the_same_seed_gives_the_same_chunk_whoever_is_asked_beside_it(
        self, opened: OpenEngine
    ) -> None:
        async def ask_together() -> Sequence[ActionChunk]:
            return await asyncio.gather(*(self.act(opened, seed, seed=seed) for seed in range(6)))

        alone = [opened.run(self.act(opened, seed, seed=seed)) for seed in range(6)]
        for one, other in zip(alone, opened.run(ask_together()), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=self.tolerance)
        another = opened.run(self.act(opened, 0, seed=123))
        assert (another.tokens != alone[0].tokens).any()

    def test_a_sampling_that_is_none_fails_its_caller_and_nobody_else(
        self, opened: OpenEngine
    ) -> None:
        with pytest.raises(ValueError, match=r"Sampling\.temperature is 0"):
            opened.run(self.act(opened, 0, temperature=0.0))
        chunk = opened.run(self.act(opened, 0, seed=1))
        assert self.gap(opened.policy, 0, chunk) < self.tolerance

    def test_a_cancelled_decision_is_given_up(self, opened: OpenEngine) -> None:
        opened.run(cancel(self.act(opened, 1, seed=1)))
        chunk = opened.run(self.act(opened, 1, seed=1))
        assert self.gap(opened.policy, 1, chunk) < self.tolerance

    def test_new_weights_act_from_their_publication_on(self, opened: OpenEngine) -> None:
        first = opened.policy
        for version, policy in (
            (7, move_weights(first, 1)),
            (8, move_weights(first, 2)),
            (9, first),
        ):
            opened.run(opened.publish(policy, version))
            assert opened.engine.weight_version == version
            for seed in range(2):
                chunk = opened.run(self.act(opened, seed, seed=seed))
                assert chunk.weight_version == version
                assert self.gap(policy, seed, chunk) < self.tolerance

    def test_no_chunk_mixes_versions_while_weights_change_under_traffic(
        self, opened: OpenEngine
    ) -> None:
        first = opened.policy
        by_version = {20: move_weights(first, 1), 21: move_weights(first, 2), 22: first}
        later = opened.run(self.ask_while_weights_change(opened, by_version))
        assert {chunk.weight_version for _, chunk in later} == {20, 21, 22}
        for seed, chunk in later:
            assert self.gap(by_version[chunk.weight_version], seed, chunk) < self.tolerance

    async def ask_while_weights_change(
        self, opened: OpenEngine, by_version: dict[int, Any]
    ) -> list[tuple[int, ActionChunk]]:
        """Ask without end while each version is published; return the chunks of these versions."""
        answers: list[tuple[int, ActionChunk]] = []
        is_over, answered = asyncio.Event(), asyncio.Event()

        async def ask(seed: int) -> None:
            while not is_over.is_set():
                answers.append((seed, await self.act(opened, seed, seed=len(answers))))
                answered.set()

        async with asyncio.TaskGroup() as tasks:
            for seed in range(6):
                tasks.create_task(ask(seed))
            for version, policy in by_version.items():
                await opened.publish(policy, version)
                while sum(chunk.weight_version == version for _, chunk in answers) < 6:
                    answered.clear()
                    await answered.wait()
            is_over.set()
        return [(seed, chunk) for seed, chunk in answers if chunk.weight_version in by_version]


class ChatEngineContract(EngineContract):
    """Rules of an engine that generates replies. Overwrite `make_policy` and `open_engine`."""

    asked: ClassVar[tuple[Message, ...]] = (Message(role="user", content="what is 3 plus 4"),)
    max_reply: ClassVar[int] = 24
    """Tokens of the longest reply that the engine gives unless it is asked for fewer."""

    async def say(
        self, opened: OpenEngine, messages: tuple[Message, ...] | None = None, **sampling: Any
    ) -> Completion:
        completion: Completion = await opened.engine.generate(
            messages or self.asked, sampling=Sampling(**sampling)
        )
        return completion

    def gap(self, policy: Any, reply: Completion, temperature: float = 1.0) -> float:
        """Return how far the engine's log-probs are from those of a policy, at most."""
        batch = policy.prepare([{"prompt_tokens": reply.prompt_tokens, "grammars": ()}])
        temperature = temperature if reply.temperature is None else reply.temperature
        found, _ = score(policy, batch, torch.from_numpy(reply.tokens)[None], temperature)
        return float((found[0] - torch.from_numpy(reply.log_probs)).abs().max())

    def test_a_reply_is_a_message_with_its_tokens_log_probs_and_versions(
        self, opened: OpenEngine
    ) -> None:
        reply = opened.run(self.say(opened, seed=1))
        policy, length = opened.policy, len(reply.tokens)
        assert 1 <= length <= self.max_reply
        assert reply.tokens.dtype == np.int64
        assert (reply.log_probs.shape, reply.log_probs.dtype) == ((length,), np.float32)
        assert reply.weight_versions.tolist() == [opened.engine.weight_version] * length
        np.testing.assert_array_equal(reply.prompt_tokens, policy.render(self.asked))
        assert reply.message == policy.parse(policy.decode(reply.tokens))
        ended = reply.tokens[-1] in policy.stop_tokens
        assert reply.finish_reason == ("stop" if ended else "length")
        assert ended or length == self.max_reply

    @pytest.mark.parametrize("temperature", [0.8, 1.0, 1.5])
    def test_log_probs_of_a_reply_are_those_of_the_learner_after_temperature(
        self, opened: OpenEngine, temperature: float
    ) -> None:
        async def ask_together() -> Sequence[Completion]:
            asked = (self.say(opened, seed=seed, temperature=temperature) for seed in range(4))
            return await asyncio.gather(*asked)

        replies = opened.run(ask_together())
        replies.append(opened.run(self.say(opened, greedy=True, temperature=temperature)))
        for reply in replies:
            assert self.gap(opened.policy, reply, temperature) < self.tolerance

    def test_the_same_seed_gives_the_same_reply(self, opened: OpenEngine) -> None:
        first, second, other = (opened.run(self.say(opened, seed=seed)) for seed in (4, 4, 5))
        np.testing.assert_array_equal(first.tokens, second.tokens)
        assert first.tokens.tolist() != other.tokens.tolist()

    def test_a_conversation_goes_on_from_what_was_said(self, opened: OpenEngine) -> None:
        first = opened.run(self.say(opened, seed=2))
        longer = (*self.asked, first.message, Message(role="user", content="and 5"))
        second = opened.run(self.say(opened, longer, seed=3))
        np.testing.assert_array_equal(second.prompt_tokens, opened.policy.render(longer))
        assert self.gap(opened.policy, second) < self.tolerance

    def test_tools_are_part_of_the_prompt(self, opened: OpenEngine) -> None:
        tool = ToolSpec(name="add", description="adds", parameters={"type": "object"})
        reply = opened.run(
            opened.engine.generate(self.asked, tools=(tool,), sampling=Sampling(), max_tokens=2)
        )
        rendered = opened.policy.render(self.asked, (tool,))
        np.testing.assert_array_equal(reply.prompt_tokens, rendered)
        assert len(reply.tokens) <= 2

    def test_a_prompt_without_room_for_a_reply_is_refused(self, opened: OpenEngine) -> None:
        words = "1 " * (opened.policy.context_size + 44)
        with pytest.raises(ContextOverflow):
            opened.run(self.say(opened, (Message(role="user", content=words),)))
        with pytest.raises(ValueError, match="max_tokens is 0"):
            opened.run(opened.engine.generate(self.asked, max_tokens=0))

    def test_a_cancelled_reply_is_given_up(self, opened: OpenEngine) -> None:
        opened.run(cancel(self.say(opened, seed=1)))
        reply = opened.run(self.say(opened, seed=1))
        assert self.gap(opened.policy, reply) < self.tolerance


async def cancel(asking: Coroutine[Any, Any, Any]) -> None:
    """Begin a request and cancel it."""
    task = asyncio.create_task(asking)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
