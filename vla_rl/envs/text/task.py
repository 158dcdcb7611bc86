"""What the author of a text environment writes: a task, which says what is asked, what tools there are, and who did well.

    setup ─► Ask ─► (tools, as often as the agent calls them) ─► reply ─► Ask ─► ... ─► reply ─► Done

`TextEpisode` does the rest: it runs the tools, answers malformed calls, and holds limits and deadlines.
"""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from vla_rl.envs.text.limits import TextLimits
from vla_rl.types import DEFAULT_AGENT, Info, Message

if TYPE_CHECKING:
    from vla_rl.sandbox import Sandbox


class Ask(msgspec.Struct, frozen=True):
    """The episode goes on: this is said, and that agent replies."""

    say: str | Sequence[Message]
    """A text is said as the user. Messages are appended as they are, a system message for example."""

    agent: str = DEFAULT_AGENT
    """Who replies next. An agent that had no turn yet begins its own conversation with `say`."""

    reward: float = 0.0
    """What the agent that just replied earns for its reply."""

    rewards: dict[str, float] = {}
    """What agents earn beside that, by name."""

    info: Info = {}


class Done(msgspec.Struct, frozen=True):
    """The episode is over."""

    reward: float
    """What the agent that just replied earns for its reply."""

    is_success: bool
    """Whether the task was solved."""

    rewards: dict[str, float] = {}
    """What agents earn beside that, by name; a team's reward is one number for each of them."""

    info: Info = {}


class TextTask(abc.ABC):
    """One text episode, as its author sees it: a new instance for each, so its state may stand in attributes.

    The constructor takes plain values (`EnvSpec.kwargs`, checked against its type hints) and does no I/O. All methods run in
    the event loop: what may take long or hang is a scorer or a plain `def` tool, which run in processes of their own.
    """

    limits: TextLimits = TextLimits()
    agents: ClassVar[tuple[str, ...]] = (DEFAULT_AGENT,)
    """Who takes part; `Ask.agent` is one of them."""

    _sandbox: "Sandbox | None" = None

    @abc.abstractmethod
    async def setup(self, seed: int, options: Info) -> Ask | str:
        """Begin the episode: everything random about it comes from `seed`; `options` are `EpisodeSpec.options`."""

    @abc.abstractmethod
    async def reply(self, text: str) -> Ask | Done:
        """The agent whose turn it was has replied with text and no tool calls."""

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """The tools that `agent` has: functions with type hints and a docstring. An `async def`, which may be a method, runs
        in the loop; a plain `def` at the top of a module runs in a process of its own, and may hang, crash or be hostile."""
        return ()

    @property
    def sandbox(self) -> "Sandbox":
        """Processes for scorers and other dangerous work. Raises: RuntimeError outside of an episode."""
        if self._sandbox is None:
            raise RuntimeError(
                f"{type(self).__name__} has no sandbox outside of an episode; lease it from a TextEnvPool."
            )
        return self._sandbox

    def attach(self, sandbox: "Sandbox") -> None:
        """Given by the episode before `setup`."""
        self._sandbox = sandbox
