"""Tasks, episodes, replies for the tests of text environments."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sample_tools import broken, crashes, forks, hangs, loud, slow, weather, words

from vla_rl.envs.text import Ask, Done, TextLimits, TextTask
from vla_rl.types import EnvSpec, EpisodeSpec, Message, ToolCall


class EchoTask(TextTask):
    """Says what was said, `num_replies` times, with all the tools above."""

    def __init__(
        self, num_replies: int = 2, limits: TextLimits | None = None, tags: tuple[str, ...] = ()
    ) -> None:
        self._left, self.tags = num_replies, tags
        self.limits = limits if limits is not None else TextLimits()

    async def setup(self, seed: int, options: dict[str, Any]) -> str:
        return f"seed {seed}, options {options}"

    async def reply(self, text: str) -> Ask | Done:
        self._left -= 1
        if self._left == 0:
            return Done(1.0, True, info={"last": text})
        return Ask(f"you said {text}", reward=0.25)

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        return (weather, slow, broken, hangs, loud, forks, crashes, words)


class TalkativeTask(TextTask):
    """Says as many numbers as it is told to, first and later."""

    def __init__(self, first: int, later: int) -> None:
        self._first, self._later = first, later

    async def setup(self, seed: int, options: dict[str, Any]) -> Ask:
        return Ask("1 " * self._first)

    async def reply(self, text: str) -> Ask:
        return Ask("2 " * self._later)


class MisbehavingTask(TextTask):
    """Breaks its contract in the way that it is told to."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.limits = TextLimits(setup_timeout_s=0.05, reply_timeout_s=0.05)

    async def setup(self, seed: int, options: dict[str, Any]) -> Any:
        if self._fault == "setup hangs":
            await asyncio.Event().wait()
        return {
            "setup raises": lambda: 1 / 0,
            "setup says nothing": lambda: Ask(()),
            "setup gives a number": lambda: 3,
        }.get(self._fault, lambda: "?")()

    async def reply(self, text: str) -> Any:
        if self._fault == "reply hangs":
            await asyncio.Event().wait()
        if self._fault == "reply raises":
            raise LookupError("no row")
        return {
            "reply gives a text": "again",
            "reply asks a stranger": Ask("?", agent="stranger"),
            "reply says a number": Ask(3),  # type: ignore[arg-type]
            "reply says texts": Ask(["again"]),  # type: ignore[list-item]
            "reply says nothing": Ask([Message(role="user", content=None)]),  # type: ignore[arg-type]
            "reply pays in words": Done("1", True),  # type: ignore[arg-type]
            "reply pays nothing": Done(None, True),  # type: ignore[arg-type]
        }.get(self._fault, Done(1.0, True, rewards={"stranger": 1.0}))

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        return (lambda: None,) if self._fault == "a tool without a name" else ()


def spec_of(
    env_id: str, seed: int = 0, options: dict[str, Any] | None = None, **kwargs: Any
) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=0,
        env=EnvSpec(id=env_id, kwargs=kwargs),
        task=env_id,
        seed=seed,
        policy_seed=0,
        options=options or {},
    )


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def ask_tool(*calls: tuple[str, str], errors: tuple[str, ...] = ()) -> Message:
    """A reply with tool calls (name, arguments as JSON), numbered from 0."""
    made = tuple(
        ToolCall(id=str(number), name=name, arguments=text)
        for number, (name, text) in enumerate(calls)
    )
    return Message(role="assistant", tool_calls=made, call_errors=errors)
