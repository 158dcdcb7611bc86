"""External agents: any program or coroutine that uses OpenAI's API.

It can run an episode and be trained.

episode ──► env.reset ──► task ──► the agent, with base_url and api_key of a session ──► answer, or a reward of its own
                                    env.step(answer) ──► reward ──► Trajectory of all calls under the key
"""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from vla_rl.endpoint.server import Endpoint
from vla_rl.endpoint.session import Session
from vla_rl.errors import ActorFrozen, EnvError
from vla_rl.rollout import stop_reason
from vla_rl.types import (
    Agent,
    LanguagePolicies,
    Message,
    StopReason,
    TextEnv,
    TextStart,
    ToolSpec,
    Trajectory,
)
from vla_rl.util.processes import inherited_environment
from vla_rl.util.tasks import await_end

_OUTPUT_BYTES = 1 << 20


class ExternalTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task that an external agent gets for one episode.

    Example:
        ExternalTask(base_url="http://127.0.0.1:40121/v1", api_key="vla-3fX...",
                     messages=(Message(role="user", content="2 + 2?"),))
    """

    base_url: str
    api_key: str
    messages: tuple[Message, ...]
    """The conversation that the environment starts."""

    tools: tuple[ToolSpec, ...] = ()
    """The environment's tools; an external agent usually brings its own."""

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        return self.messages[-1].content


ExternalAgent: TypeAlias = Callable[[ExternalTask], Awaitable[str | float]]
"""A coroutine function that returns its final answer, which the environment scores, or a number,
which is its reward."""


def external_agent(
    run: ExternalAgent | Sequence[str], endpoint: Endpoint, *, timeout_s: float = 600.0
) -> Agent:
    """Make an agent whose episodes `run` acts in, through the endpoint.

    Args:
        run: a coroutine function that takes an `ExternalTask`; or the command line of a program,
            which gets `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment and the prompt on
            its standard input, and prints its answer.
        endpoint: the endpoint, which has to be open while episodes run.
        timeout_s: most seconds for the whole episode. An agent that has not answered by then is
            stopped. Its calls until then are a trajectory that was cut off, with reward 0; if it
            made none, `ActorFrozen` is raised, so that the episode is run again, as often as the
            scheduler allows.

    An agent that fails because its conversation exceeds the policy's context is cut off in the same
    way; one that fails because the policy's chat template rejects the policy's own replies ends with
    `StopReason.REPLY_REJECTED`. All other errors of the agent, the policy or the environment are
    raised unchanged; those of a program as `EnvError`, with its last output.
    """
    agent = run if callable(run) else _Program(tuple(run))

    async def run_episode(env: TextEnv, policy: LanguagePolicies) -> Trajectory:
        start = await env.reset()
        with endpoint.session(policy) as session:
            answer = await _get_answer(agent, session, start, timeout_s)
        if isinstance(answer, StopReason):
            return session.trajectory(env.episode, 0.0, answer)
        if not session.calls:
            raise EnvError(
                "the external agent ended without calling the policy; give its client the "
                "base_url and api_key of its task"
            )
        if not isinstance(answer, str):
            if not isinstance(answer, int | float) or not math.isfinite(answer):
                raise EnvError(
                    f"the external agent returned {answer!r}, expected its reward as a finite "
                    "number, or its answer as text"
                )
            reward = float(answer)
            return session.trajectory(
                env.episode, reward, StopReason.SUCCESS if reward >= 1.0 else StopReason.TERMINATED
            )
        outcome = await env.step(Message(role="assistant", content=answer))
        # The agent was called once and has returned: nobody would take another turn.
        if not outcome.terminated and not outcome.truncated:
            raise EnvError(
                "the environment continues after the external agent's answer, expected one that "
                "scores it at once"
            )
        reason = stop_reason(outcome.terminated, outcome.info)
        return session.trajectory(env.episode, outcome.reward, reason, outcome.info)

    return run_episode


async def _get_answer(
    agent: ExternalAgent, session: Session, start: TextStart, timeout_s: float
) -> str | float | StopReason:
    """Return the agent's answer, or the reason why it was cut off after its first call."""
    task = ExternalTask(
        base_url=session.base_url,
        api_key=session.api_key,
        messages=start.messages,
        tools=start.tools,
    )
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            answer = await agent(task)
    except Exception as error:
        # The policy's own failure first: the agent has only seen status 500, and what it raised
        # because of that hides the cause.
        if session.failure is not None:
            raise session.failure from error
        if isinstance(error, TimeoutError) and deadline.expired():
            # Nothing to learn from: the scheduler runs the episode again, as one whose simulator
            # has died.
            if not session.calls:
                raise ActorFrozen(
                    "external agent", 0, f"it made no call within timeout_s={timeout_s:g}"
                ) from error
            return StopReason.DEADLINE
        # Whatever an agent raises after a refusal counts as its consequence, because each client
        # has classes of errors of its own.
        refusal = session.overflow or session.rejection
        if refusal is None:
            raise
        if not session.calls:
            raise refusal from error
        return StopReason.REPLY_REJECTED if refusal is session.rejection else StopReason.TOKEN_LIMIT
    # An agent may catch the error of status 500 and answer all the same.
    if session.failure is not None:
        raise session.failure
    return answer


class _Program:
    """A command line as an external agent: a new process for every episode.

    It is killed with all that it started.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command

    async def __call__(self, task: ExternalTask) -> str:
        process = await self._start(task)
        try:
            # Input, output and errors side by side: a program that prints before it has read would
            # wait for us, and we for it.
            async with asyncio.TaskGroup() as group:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                out = group.create_task(
                    _read_bounded(process.stdout), name="output of an external agent"
                )
                err = group.create_task(
                    _read_bounded(process.stderr), name="errors of an external agent"
                )
                group.create_task(
                    _write_prompt(process.stdin, task.prompt), name="input of an external agent"
                )
                code = await process.wait()
                # another process that holds its output would keep us reading
                _kill_group(process.pid)
        finally:
            _kill_group(process.pid)
            await process.wait()
        if code != 0:
            last = "\n    ".join(err.result().strip().splitlines()[-5:])
            raise EnvError(
                f"the external agent {self._command[0]!r} ended with exit code {code}; the "
                f"end of its stderr:\n    {last}"
            )
        return out.result().strip()

    async def _start(self, task: ExternalTask) -> asyncio.subprocess.Process:
        """Start the process; delay a cancellation until it has started.

        Its children would survive before that.
        """
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={
                    **inherited_environment(),
                    "OPENAI_BASE_URL": task.base_url,
                    "OPENAI_API_KEY": task.api_key,
                },
                start_new_session=True,
            )
        )
        try:
            return await await_end(starting)
        except asyncio.CancelledError:
            if starting.exception() is None:
                _kill_group(starting.result().pid)
                await starting.result().wait()
            raise


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        # The group, because a command line is often a shell, whose death leaves the agent running.
        os.killpg(pid, signal.SIGKILL)


async def _write_prompt(stdin: asyncio.StreamWriter, text: str) -> None:
    """Write the prompt; a program may close its input without reading it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(text.encode(errors="replace"))
        await stdin.drain()
    stdin.close()


async def _read_bounded(stream: asyncio.StreamReader) -> str:
    """Return the first MiB of a program's output; the rest is read and dropped."""
    kept = bytearray()
    # Read to its end, since a full pipe would stop the program.
    while data := await stream.read(1 << 16):
        kept += data[: max(0, _OUTPUT_BYTES - len(kept))]
    return kept.decode(errors="replace")
