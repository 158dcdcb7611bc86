"""Episodes of text tasks, leased from a pool: tools, malformed calls, limits, deadlines.

    step(message) ─┬─ tool calls, readable or not ─► a tool message for each, the same agent replies again
                   └─ text alone ─► TextTask.reply ─► Ask: the next agent replies ─ or ─ Done

`step` returns an outcome for any text that a model writes. A fault of the task itself raises
`EnvError`; a stage that takes too long raises `ActorFrozen`, and the episode is run again.

The pool has the contract of a pool of simulators, without a process for each environment: an
episode is a coroutine in this loop; tools, scorers and code run in the sandbox that the pool owns.

    async with TextEnvPool(TextPoolConfig(num_envs=64)) as pool:
        async with pool.lease(episode) as env:      # `episode.env` names the task: `EnvSpec(id="text/arithmetic")`
            start = await env.reset()
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypeVar

import msgspec

from vla_rl.envs.text.task import Ask, Done, TextTask, make_text_task
from vla_rl.envs.text.tools import Toolbox
from vla_rl.errors import ActorFrozen, EnvError, VlaRlError
from vla_rl.sandbox import Sandbox, SandboxConfig
from vla_rl.types import (
    ANY_REPLY,
    DEFAULT_AGENT,
    Config,
    EnvSpec,
    EpisodeSpec,
    Message,
    PositiveInt,
    TextOutcome,
    TextStart,
    ToolSpec,
)
from vla_rl.util.foreign_data import repair_texts, repair_unicode, require_text
from vla_rl.util.stalls import waiting
from vla_rl.util.tasks import TookTooLong, limit_time
from vla_rl.util.values import excerpt

T = TypeVar("T")


class TextEpisode:
    """Implements `vla_rl.types.TextEnv` for one task and one episode.

    The info of every outcome has `num_turns`, `num_tool_calls`, `tool_faults` (counts by kind) and
    `rewards` (each agent's total so far, by name). At the end it has `is_success` and `stop`, which
    is "finished", or the limit that ended the episode: "max_turns", "max_tool_calls" or
    "max_characters".
    """

    def __init__(self, task: TextTask, episode: EpisodeSpec, sandbox: Sandbox) -> None:
        self._task, self._episode, self._sandbox = task, episode, sandbox
        self._toolboxes: dict[str, Toolbox] = {}
        self._agent, self._options = DEFAULT_AGENT, ANY_REPLY
        self._num_turns = self._num_tool_calls = self._num_characters = 0
        self._faults: Counter[str] = Counter()
        self._rewards: dict[str, float] = {}
        self._state = "new"

    @property
    def episode(self) -> EpisodeSpec:
        """The episode this lease is for."""
        return self._episode

    async def reset(self) -> TextStart:
        """Set the task up.

        Raises: EnvError if it raises or returns no message; ActorFrozen if it takes too long.
        """
        self._require("new", "an episode is reset once; lease the next one")
        self._task.attach(self._sandbox)
        # An agent that never earns is reported with 0, and not left out.
        self._rewards = dict.fromkeys(self._task.agents, 0.0)
        ask = await self._stage(
            "setup", self._task.setup(self._episode.seed, self._episode.options)
        )
        ask = Ask(ask, agent=self._task.agents[0]) if isinstance(ask, str) else ask
        if not isinstance(ask, Ask):
            raise EnvError(
                f"{self._name}.setup returned {type(ask).__name__}, expected Ask or a text."
            )
        messages, tools = self._begin_turn(ask)
        self._state = "open"
        return TextStart(messages=messages, tools=tools, agent=self._agent, options=self._options)

    async def step(self, message: Message) -> TextOutcome:
        """Pass on the current agent's reply, and return the outcome.

        Raises: EnvError for a fault of the task itself.
        """
        self._require(
            "open", "call reset() first, and stop after an outcome that is terminated or truncated"
        )
        self._num_turns += 1
        # Half a surrogate pair in a reply raised TypeError in the tokenizer of the next turn, which
        # ended the run.
        message = _make_encodable(message)
        self._num_characters += _count_characters((message,))
        if message.tool_calls or message.call_errors:
            return await self._answer_calls(message)
        done = await self._stage("reply", self._task.reply(message.content))
        if isinstance(done, Done):
            self._credit(done.reward, done.rewards)
            # None, as of a pattern that was not found, is no success; the episode has ended all the same.
            return self._outcome((), done, is_success=bool(done.is_success))
        if not isinstance(done, Ask):
            raise EnvError(
                f"{self._name}.reply returned {type(done).__name__}, expected Ask or Done."
            )
        self._credit(done.reward, done.rewards)
        messages, tools = self._begin_turn(done)
        return self._outcome(messages, done, tools=tools)

    async def end_lease(self) -> None:
        """End the lease: the task releases what it opened, and the episode can no longer be used."""
        self._state = "over"
        await self._stage("close", self._task.close())

    async def _answer_calls(self, message: Message) -> TextOutcome:
        """Return a tool message for each call; the calls of one reply run at the same time."""
        self._faults["unreadable"] += len(message.call_errors)
        answers = [Message(role="tool", content=f"error: {error}") for error in message.call_errors]
        room = self._task.limits.max_tool_calls - self._num_tool_calls
        self._num_tool_calls += len(message.tool_calls)
        # Calls beyond the limit get no answer, because the episode ends with this outcome.
        calls = message.tool_calls[: max(0, room)]
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._toolbox().answer(call), name=f"tool {call.name}")
                for call in calls
            ]
        for task in running:
            answered, answer = task.result()
            answers.append(answered)
            if answer.fault is not None:
                self._faults[answer.fault] += 1
        self._num_characters += _count_characters(answers)
        done = await self._stage("after_tool_calls", self._task.after_tool_calls())
        if done is not None:
            self._credit(done.reward, done.rewards)
            return self._outcome(tuple(answers), done, is_success=bool(done.is_success))
        return self._outcome(tuple(answers))

    def _begin_turn(self, ask: Ask) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
        if ask.agent not in self._task.agents:
            raise EnvError(
                f"{self._name} asks agent {ask.agent!r}, expected one of its agents "
                f"{list(self._task.agents)}."
            )
        self._agent, self._options = ask.agent, ask.options
        asked = [Message(role="user", content=ask.say)] if isinstance(ask.say, str) else ask.say
        if not isinstance(asked, Sequence):
            raise EnvError(f"{self._name} says {excerpt(asked)}, expected a text or messages.")
        messages = tuple(self._check_message(message) for message in asked)
        if not messages and self._state == "new":
            raise EnvError(f"{self._name}.setup returned no message, expected at least one.")
        self._num_characters += _count_characters(messages)
        return messages, self._toolbox().list_tools()

    def _check_message(self, message: Any) -> Message:
        """Return a message of the task, with text that can be encoded.

        Raises: EnvError for anything else than a message of text.
        """
        if not isinstance(message, Message):
            raise EnvError(
                f"{self._name} says {excerpt(message)}, expected a text or messages "
                "(`vla_rl.types.Message`)."
            )
        for field in ("role", "content"):
            require_text(
                getattr(message, field), f"the {field} of a message of {self._name}", EnvError
            )
        return _make_encodable(message)

    def _toolbox(self) -> Toolbox:
        """Return the current agent's tools.

        A wrong definition is an error of the task, not of the model.
        """
        if self._agent not in self._toolboxes:
            try:
                functions = self._task.tools(self._agent)
                self._toolboxes[self._agent] = Toolbox(functions, self._sandbox, self._task.limits)
            except (TypeError, ValueError) as error:
                raise EnvError(f"{self._name} has a tool that cannot be used: {error}") from error
        return self._toolboxes[self._agent]

    def _outcome(
        self,
        messages: tuple[Message, ...],
        turn: Ask | Done | None = None,
        *,
        tools: tuple[ToolSpec, ...] = (),
        is_success: bool | None = None,
    ) -> TextOutcome:
        limit = self._passed_limit() if is_success is None else None
        info = {
            "num_turns": self._num_turns,
            "num_tool_calls": self._num_tool_calls,
            "tool_faults": dict(self._faults),
            "rewards": dict(self._rewards),
            **(repair_texts(turn.info) if turn is not None else {}),
        }
        if is_success is not None or limit is not None:
            info |= {
                "is_success": bool(is_success),
                "stop": limit if limit is not None else "finished",
            }
            self._state = "over"
        return TextOutcome(
            messages=messages,
            reward=float(turn.reward) if turn is not None else 0.0,
            credits=dict(turn.rewards) if turn is not None else {},
            terminated=is_success is not None,
            truncated=limit is not None,
            info=info,
            agent=self._agent,
            tools=tools,
            options=self._options,
        )

    def _passed_limit(self) -> str | None:
        limits = self._task.limits
        if self._num_turns >= limits.max_turns:
            return "max_turns"
        if self._num_tool_calls > limits.max_tool_calls:
            return "max_tool_calls"
        return "max_characters" if self._num_characters > limits.max_characters else None

    def _credit(self, reward: Any, rewards: dict[str, Any]) -> None:
        for agent, earned in ((self._agent, reward), *rewards.items()):
            if agent not in self._rewards:
                raise EnvError(
                    f"{self._name} rewards agent {agent!r}, expected one of {list(self._rewards)}."
                )
            if isinstance(earned, str) or not isinstance(earned, SupportsFloat):
                raise EnvError(
                    f"{self._name} rewards agent {agent!r} with {excerpt(earned)}, expected a number."
                )
            self._rewards[agent] += float(earned)

    async def _stage(self, stage: str, work: Awaitable[T]) -> T:
        limit = "setup_timeout_s" if stage == "setup" else "reply_timeout_s"
        timeout_s = getattr(self._task.limits, limit)
        try:
            return await limit_time(timeout_s, work)
        except VlaRlError:
            raise
        except TookTooLong as error:
            # Reported as a frozen simulator is: the scheduler runs the episode again, and one that
            # is lost repeatedly ends the run.
            cause = f"{stage} took longer than {limit}={timeout_s:g}"
            raise ActorFrozen(f"text environment {self._name}", 0, cause) from error
        except Exception as error:
            raise EnvError(
                f"{self._name}.{stage} raised {type(error).__name__}: {error}"
            ) from error

    @property
    def _name(self) -> str:
        return type(self._task).__name__

    def _require(self, state: str, what: str) -> None:
        if self._state != state:
            raise RuntimeError(
                f"the text episode {self._episode.episode_id} is {self._state}; {what}."
            )


def _make_encodable(message: Message) -> Message:
    """Return a message whose texts can be encoded; half surrogates become U+FFFD."""
    calls = tuple(
        msgspec.structs.replace(
            call, name=repair_unicode(call.name), arguments=repair_unicode(call.arguments)
        )
        for call in message.tool_calls
    )
    return msgspec.structs.replace(
        message, content=repair_unicode(message.content), tool_calls=calls
    )


def _count_characters(messages: Sequence[Message]) -> int:
    return sum(
        len(message.content)
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in messages
    )


class TextPoolConfig(Config, frozen=True, kw_only=True):
    """Number of concurrent text episodes, and their sandbox."""

    num_envs: PositiveInt = 64
    """Number of concurrent episodes; each is a coroutine, so hundreds cost little."""

    sandbox: SandboxConfig = SandboxConfig()
    """Processes for tools, scorers and code."""


class TextEnvPool:
    """Implements `vla_rl.types.EnvPool` for text environments.

    Args:
        config: sizes and sandbox.
        specs: environments that will be used, if known: a wrong name or argument is rejected on
            entering.

    Raises on entering: ConfigError for a spec that cannot be made.
    """

    def __init__(self, config: TextPoolConfig | None = None, specs: Sequence[EnvSpec] = ()) -> None:
        self._config = config if config is not None else TextPoolConfig()
        self._specs = tuple(specs)
        self._sandbox = Sandbox(self._config.sandbox)
        self._free = asyncio.Semaphore(self._config.num_envs)
        self._num_leases = 0
        self._wait_s = 0.0
        self._is_open = False

    async def __aenter__(self) -> Self:
        made: list[EnvSpec] = []
        for spec in self._specs:
            # A wrong name or argument fails here, and not in the first episodes of a run that has
            # started.
            if spec not in made:
                made.append(spec)
                make_text_task(spec)
        await self._sandbox.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        await self._sandbox.__aexit__(kind, error, trace)

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        return self._config.num_envs

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[TextEpisode]:
        """Lease an environment for this episode; leaving the context frees it in any state.

        Raises: ConfigError if the environment cannot be made; RuntimeError if the pool is not open.
        """
        if not self._is_open:
            raise RuntimeError("the pool of text environments is not open; use `async with`.")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with waiting(f"episode {episode.episode_id}", on="a free text environment"):
            await self._free.acquire()
        try:
            self._num_leases += 1
            self._wait_s += loop.time() - began
            env = TextEpisode(make_text_task(episode.env), episode, self._sandbox)
            try:
                yield env
            finally:
                await env.end_lease()
        finally:
            self._free.release()

    def metrics(self) -> dict[str, float]:
        """Return counts since the start; keys read like paths."""
        calls: Counter[str] = self._sandbox.counts
        return {
            "text/leases": float(self._num_leases),
            "text/lease_wait_s": self._wait_s,
            **{f"text/calls/{name}": float(count) for name, count in sorted(calls.items())},
        }
