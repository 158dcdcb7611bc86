"""What language agents and text environments say to each other: messages, tools, completions, turns.

    reset ─► TextStart ─► generate ─► Completion.message ─► step ─► TextOutcome ─► generate ─► ...

A conversation belongs to an agent, by name. Where several agents share an environment, each has its own conversation and
its own policy; the environment says whose turn it is and what is appended to that agent's conversation.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from vla_rl.types.episode import EpisodeSpec, Sampling
from vla_rl.types.reply_options import ANY_REPLY, ReplyOptions
from vla_rl.types.struct import ExplainsFields

DEFAULT_AGENT = "policy"
"""The agent's name where there is only one."""

FinishReason: TypeAlias = Literal["stop", "length", "aborted"]
"""Why generation ended: the model said so, `max_tokens` or the context was full, or the request was given up."""


class ToolCall(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A tool that a model asked for."""

    id: str
    """Unique in its conversation; the tool's answer names it."""

    name: str

    arguments: str
    """JSON text as the model wrote it; an object where it follows the schema, which nobody has checked yet."""


class Message(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""

    content: str = ""

    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant: the tools it asks for."""

    tool_call_id: str | None = None
    """Of a tool's answer: the call that it answers."""

    name: str | None = None
    """Of a tool's answer: the tool. Of others: who speaks, where several share a role."""

    call_errors: tuple[str, ...] = ()
    """Of an assistant: what is wrong with each tool call that could not be read, in a sentence that the environment can
    answer with. The text of such a call stays in `content`."""


Prompt: TypeAlias = Sequence[Message] | str | np.ndarray
"""A conversation to answer, a text to continue, or the tokens of one, int64 [P]."""


class ToolSpec(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A tool as a model is told about it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""

    is_strict: bool = False
    """Restrict sampling so that the arguments of every call satisfy `parameters`; a schema that cannot be enforced is an
    error."""


class TokenReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token, and the likeliest tokens in its place."""

    text: bytes
    """UTF-8, of which one token may hold a part of a character."""

    alternatives: tuple[tuple[bytes, float], ...] = ()
    """Texts and log-probs, the likeliest first."""


class Completion(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One reply of a policy, and how it was chosen."""

    message: Message
    """Parsed by the policy's own chat format, tool calls included."""

    prompt_tokens: np.ndarray
    """int64 [P], exactly what was fed."""

    tokens: np.ndarray
    """int64 [T], what was sampled, the token that ended the turn included."""

    log_probs: np.ndarray
    """float32 [T], natural log of each token's probability under the weights that chose it, after temperature and under
    `grammar`."""

    weight_versions: np.ndarray
    """int64 [T], number of updates applied to the weights that chose each token."""

    finish_reason: FinishReason

    temperature: float | None = None
    """Temperature of `log_probs`, noted by the policy that an agent is handed; None: that of the episode's own sampling."""

    grammar: str | None = None
    """Grammar that sampling was restricted to, in llguidance's dialect of Lark; None: every token could be sampled."""

    stopped_by: str | None = None
    """The stop text of `ReplyOptions.stop` that ended the reply."""

    report: tuple[TokenReport, ...] | None = None
    """One entry for each token, if `ReplyOptions.top_log_probs` asked for them."""


class LanguagePolicy(Protocol):
    """One policy that speaks, however and wherever it is computed; batches whoever waits."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply. Without `sampling`: the episode's own. Its seed is always this decision's.

        Without `max_tokens`: the engine's own limit. Cancelling the call aborts the generation.

        Raises: ContextOverflow if the prompt leaves no room for a reply; ValueError for a prompt or options that cannot be
        met, such as a schema that no grammar can express.
        """
        ...


class TextStart(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The start of a text episode."""

    messages: tuple[Message, ...]
    """The conversation of the agent whose turn it is, from its beginning."""

    tools: tuple[ToolSpec, ...] = ()

    agent: str = DEFAULT_AGENT
    """Whose turn it is."""

    options: ReplyOptions = ANY_REPLY
    """Rules for the reply to these messages."""


class TextOutcome(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """What a reply did, and what comes next."""

    messages: tuple[Message, ...]
    """Appended to the conversation of `agent`, which begins with them if it had no turn yet."""

    reward: float
    """Of the agent that replied, for this reply."""

    credits: dict[str, float] = {}
    """What agents earn beside that, by name: for what they did before."""

    terminated: bool
    """The task's own ending."""

    truncated: bool
    """Our ending, such as a limit of turns."""

    info: dict[str, Any]
    """`info["is_success"]` is a bool where the task knows success."""

    agent: str = DEFAULT_AGENT
    """Whose turn it is next."""

    tools: tuple[ToolSpec, ...] = ()
    """Of that agent from now on; empty: those it was given before."""

    options: ReplyOptions = ANY_REPLY
    """Rules for the reply to these messages."""


class TextEnv(Protocol):
    """One text environment, leased for one episode. Its methods run in the loop; work that may hang, crash or be hostile
    (tools, code, scorers) happens in killable child processes behind it."""

    @property
    def episode(self) -> EpisodeSpec:
        """The episode this lease is for."""
        ...

    async def reset(self) -> TextStart:
        """Bring the environment to the start of its episode."""
        ...

    async def step(self, message: Message) -> TextOutcome:
        """Hand over the reply of the agent whose turn it was."""
        ...
