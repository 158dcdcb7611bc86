"""Base class of text tasks, for their authors: a task asks, offers tools and gives rewards.

    setup ─► Ask ─► (tools, as often as the agent calls them) ─► reply ─► Ask ─► ... ─► reply ─► Done

`TextEpisode` does the rest: it runs the tools, answers malformed calls, and enforces limits and
deadlines.
"""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from vla_rl.envs.text.limits import TextLimits
from vla_rl.types import ANY_REPLY, DEFAULT_AGENT, Info, Message, ReplyOptions

if TYPE_CHECKING:
    from vla_rl.sandbox import Sandbox


class Ask(msgspec.Struct, frozen=True):
    """The episode continues: the agent receives this message and replies."""

    say: str | Sequence[Message]
    """Text of a user message, or messages that are appended unchanged, such as a system message."""

    agent: str = DEFAULT_AGENT
    """Agent that replies next. An agent that had no turn yet starts its own conversation with
    `say`."""

    reward: float = 0.0
    """Reward of the agent that just replied, for its reply."""

    rewards: dict[str, float] = {}
    """Additional rewards of agents, by name."""

    info: Info = {}

    options: ReplyOptions = ANY_REPLY
    """Rules for the reply to this message, also after tools were called."""


class Done(msgspec.Struct, frozen=True):
    """The episode is over."""

    reward: float
    """Reward of the agent that just replied, for its reply."""

    is_success: bool
    """Whether the task was solved."""

    rewards: dict[str, float] = {}
    """Additional rewards of agents, by name; to reward a team, give each of them the same
    number."""

    info: Info = {}


class TextTask(abc.ABC):
    """One text episode, for its author.

    Each episode has a new instance, so attributes may hold its state.

    The constructor takes plain values (`EnvSpec.kwargs`, checked against its type hints) and does
    no I/O. All methods run in the event loop. Work that may take long or hang belongs in a scorer
    or a plain `def` tool, which run in separate processes.
    """

    limits: TextLimits = TextLimits()
    agents: ClassVar[tuple[str, ...]] = (DEFAULT_AGENT,)
    """Names of the agents; `Ask.agent` is one of them."""

    _sandbox: "Sandbox | None" = None

    @abc.abstractmethod
    async def setup(self, seed: int, options: Info) -> Ask | str:
        """Start the episode: everything random about it comes from `seed`.

        `options` are `EpisodeSpec.options`.
        """

    @abc.abstractmethod
    async def reply(self, text: str) -> Ask | Done:
        """Handle the current agent's reply, which is text without tool calls."""

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """Return the tools of `agent`: functions with type hints and a docstring.

        An `async def`, which may be a method, runs in the loop; a plain `def` at the top of a
        module runs in a separate process, and may hang, crash or be hostile.
        """
        return ()

    @property
    def sandbox(self) -> "Sandbox":
        """Processes for scorers and other untrusted work.

        Raises: RuntimeError outside of an episode.
        """
        if self._sandbox is None:
            raise RuntimeError(
                f"{type(self).__name__} has no sandbox outside of an episode; lease it from a "
                "TextEnvPool."
            )
        return self._sandbox

    def attach(self, sandbox: "Sandbox") -> None:
        """Attach the sandbox; the episode calls this before `setup`."""
        self._sandbox = sandbox
