"""Text tasks as their authors write them: questions, tools, rewards.

    setup ─► Ask ─► (tools, as often as the agent calls them) ─► reply ─► Ask ─► ... ─► reply ─► Done

`TextEpisode` does the rest: it runs the tools, answers malformed calls, and enforces limits and
deadlines. A task is found by a registered id, or as `module:Class`.
"""

import abc
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.types import (
    ANY_REPLY,
    DEFAULT_AGENT,
    Config,
    EnvSpec,
    Info,
    Message,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReplyOptions,
)
from vla_rl.util.imports import check_choice, load_module, load_named

if TYPE_CHECKING:
    from vla_rl.sandbox import Sandbox


class TextLimits(Config, frozen=True, kw_only=True):
    """Limits of one episode.

    An episode that exceeds one of the first three ends as truncated. A tool's answer that is too
    long is cut, and a tool that is too slow is stopped. A stage that is too slow counts as frozen:
    the episode is lost and run again, and one that is lost repeatedly ends the run.
    """

    max_turns: PositiveInt = 16
    """Largest number of replies, of all agents together."""

    max_tool_calls: NonNegativeInt = 64
    """Largest number of tool calls, of all agents together."""

    max_characters: PositiveInt = 400_000
    """Largest number of characters of all messages, including prompts and tools' answers. (Tokens
    are counted by the engine, whose context an episode cannot exceed.)
    """

    max_answer_characters: PositiveInt = 16_000
    """Largest number of characters of one tool's answer; a longer one is cut, with a note."""

    setup_timeout_s: PositiveFloat = 120.0
    """Time limit of `TextTask.setup`, in seconds."""

    reply_timeout_s: PositiveFloat = 120.0
    """Time limit of `TextTask.reply`, in seconds, including its scorers. Those of `vla_rl.scoring`
    run for 60 s at most, but their wait for a free process of the sandbox counts here as well.
    """

    tool_timeout_s: PositiveFloat = 10.0
    """Time limit of one tool call, in seconds; a slower one is stopped, with a note in its
    answer."""


class Ask(msgspec.Struct, frozen=True):
    """The episode continues: the agent receives this message and replies.

    Example:
        Ask("23+58-7=74?", agent="checker", rewards={"solver": 0.5})
    """

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
    """The episode is over.

    Example:
        Done(1.0, is_success=True, info={"is_right": True})
    """

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
        module runs in a separate process, and may hang, crash or be hostile. A `SchemaTool` is a
        tool that another program describes.
        """
        return ()

    async def after_tool_calls(self) -> Done | None:
        """Return the end of the episode if a tool call has ended it, such as one that submits an
        answer; None: the agent replies again.
        """
        return None

    async def close(self) -> None:
        """Release what `setup` opened. Called once, when the lease ends, in whatever way."""
        return

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


_REGISTRY: Final[dict[str, str]] = {}


def register_text_task(task_id: str, path: str) -> None:
    """Register `module:Class` as `task_id`, such as `text/arithmetic`.

    Raises: ValueError if the id is taken by another class.
    """
    if ":" not in path or ":" in task_id:
        raise ValueError(
            f"{task_id!r} at {path!r}: expected an id without a colon, and `module:Class`."
        )
    if _REGISTRY.setdefault(task_id, path) != path:
        raise ValueError(
            f"{task_id!r} is {_REGISTRY[task_id]!r} already; choose another id for {path!r}."
        )


def text_task_ids() -> tuple[str, ...]:
    """Return all registered ids."""
    return tuple(sorted(_REGISTRY))


def is_text_task(spec: EnvSpec) -> bool:
    """Return whether this is a text environment: registered here, or a `module:Class` of one."""
    if spec.id in _REGISTRY:
        return True
    module, _, name = spec.id.partition(":")
    if not name or "/" in spec.id:
        return False
    return _is_text_task_class(
        getattr(load_module(module, f"text environment {spec.id!r}"), name, None)
    )


def make_text_task(spec: EnvSpec) -> TextTask:
    """Make a new task.

    Raises: ConfigError for an unknown id, class or keyword, with the nearest match, or a wrong
    value.
    """
    if spec.wrappers:
        raise ConfigError(
            f"{spec.id!r} is a text environment, which takes no wrappers of "
            f"gymnasium: {spec.wrappers}"
        )
    task_class = find_text_task(spec.id)
    kwargs = _check_kwargs(task_class, spec)
    try:
        return task_class(**kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spec.id!r} cannot be made from {spec.kwargs}: {error}") from error


def find_text_task(task_id: str) -> type[TextTask]:
    """Return the class of an id or a `module:Class`. Raises: ConfigError with the nearest match."""
    path = _REGISTRY.get(task_id, task_id)
    if ":" not in path:
        check_choice(_REGISTRY, path, "text environment", also="any `module:Class` of your own")
    found: type[TextTask] = load_named(path, "text environment", "TextTask", _is_text_task_class)
    return found


def _is_text_task_class(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, TextTask)


def _check_kwargs(task_class: type[TextTask], spec: EnvSpec) -> dict[str, Any]:
    """Convert keyword arguments to their type hints: a list becomes a tuple, a text a path."""
    parameters = inspect.signature(task_class).parameters
    hints = typing.get_type_hints(task_class.__init__)
    checked = {}
    for name, value in spec.kwargs.items():
        check_choice(parameters, name, f"argument of {spec.id!r}")
        try:
            checked[name] = msgspec.convert(value, hints.get(name, Any), strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name!r} of {spec.id!r} is {value!r}: {error}") from error
    return checked
