"""Types of language agents, with their text environments: messages, tools, completions, turns.

    reset ─► TextStart ─► generate ─► Completion.message ─► step ─► TextOutcome ─► generate ─► ...

A conversation belongs to an agent, by name. If several agents share an environment, each has its
own conversation, its own policy; the environment names the agent whose turn it is, with the
messages to append to its conversation.

A reply has options: its format, its stop texts, the tools that it may call. A format restricts sampling:
tokens that would break it get probability 0, the others are renormalised. The log-probs of such a reply
are those of the restricted distribution. `Completion.grammar` records the restriction, so that a learner
computes the same log-probs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from vla_rl.types.config import ExplainsFields
from vla_rl.types.episode import EpisodeSpec, Sampling


class JsonFormat(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """The reply is one JSON value."""

    schema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object"})
    """JSON schema that the value satisfies; by default any object."""

    is_strict: bool = True
    """Reject a schema with a keyword that no grammar can express; False: ignore such keywords."""


class RegexFormat(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    """The reply matches a regular expression from its first to its last character."""

    pattern: str
    """Pattern in the syntax of Rust's `regex`, without look-around."""


class ChoiceFormat(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """The reply is one of several texts."""

    choices: tuple[str, ...]


class GrammarFormat(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """The reply is a sentence of a context-free grammar."""

    lark: str
    """Grammar in llguidance's dialect of Lark; its first rule is `start`."""


ReplyFormat: TypeAlias = JsonFormat | RegexFormat | ChoiceFormat | GrammarFormat


class ToolRule(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that a reply may or must call.

    Example:
        ToolRule(mode="required", names=("search",), max_calls=1)
    """

    mode: Literal["auto", "none", "required"] = "auto"
    """`auto`: the model decides. `none`: the reply is read as text. `required`: the reply is one or
    more calls."""

    names: tuple[str, ...] = ()
    """Tools that may be called; empty: all tools of the request."""

    max_calls: int | None = None
    """Most calls in one reply; None: any number."""


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for one reply."""

    format: ReplyFormat | None = None
    """Format of the reply's text; None: any. If `tools` allows tool calls, the reply may also be
    one of them."""

    stop: tuple[str, ...] = ()
    """Texts that end the reply. The message holds the text before the first of them; the tokens
    include it."""

    tools: ToolRule = ToolRule()

    top_log_probs: int | None = None
    """Report the text of every token, and this many of the most likely tokens at its position;
    None: no report."""


ANY_REPLY = ReplyOptions()
"""No rules."""


DEFAULT_AGENT = "policy"
"""Name of the agent if there is only one."""

FinishReason: TypeAlias = Literal["stop", "length", "aborted"]
"""Why generation ended: the model ended it; `max_tokens` or the context was full, or its grammar
grew too complex; or the request was aborted."""


class ToolCall(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A tool that a model asked for.

    Example:
        ToolCall(id="call_0", name="search", arguments='{"query": "height of K2"}')
    """

    id: str
    """Id of the call, unique in its conversation; the tool's answer repeats it."""

    name: str

    arguments: str
    """JSON text as the model wrote it. It is not checked against the schema. A policy's own call has
    an object; that of another program may be any text."""


class Message(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One message of a conversation.

    Example:
        Message(role="user", content="What is 3 + 4?")
        Message(role="tool", content="7", tool_call_id="call_0", name="add")
    """

    role: str
    """`system`, `user`, `assistant` or `tool`."""

    content: str = ""

    images: tuple[np.ndarray, ...] = ()
    """Images that stand before the text, uint8 [H, W, 3], RGB; for policies that read images."""

    tool_calls: tuple[ToolCall, ...] = ()
    """Tools that an assistant's message calls."""

    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""

    name: str | None = None
    """Name of the tool that answers; in other messages the name of the speaker, if several share a
    role."""

    call_errors: tuple[str, ...] = ()
    """Errors of an assistant's tool calls that could not be parsed, each a sentence that the
    environment can reply with. The text of such a call stays in `content`."""


Prompt: TypeAlias = Sequence[Message] | str | np.ndarray
"""A conversation to answer, a text to continue, or the tokens of one, int64 [P]."""


class ToolSpec(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The description of a tool that a model gets.

    Example:
        ToolSpec(name="search", description="Search the notes.", parameters={
            "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]})
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, which are an object."""

    is_strict: bool = False
    """Restrict sampling so that the arguments of every call satisfy `parameters`; a schema that
    cannot be enforced raises an error."""


class TokenReport(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token, and the most likely tokens at its position."""

    text: bytes
    """Text of the token in UTF-8; it may end inside a character."""

    alternatives: tuple[tuple[bytes, float], ...] = ()
    """Texts and log-probs, the most likely first."""


class Completion(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One reply of a policy, and how it was chosen."""

    message: Message
    """Parsed by the policy's own chat format, tool calls included."""

    prompt_tokens: np.ndarray
    """int64 [P], exactly the tokens that the model got."""

    tokens: np.ndarray
    """int64 [T], the sampled tokens, with the token that ended the turn."""

    log_probs: np.ndarray
    """float32 [T], natural log of each token's probability under the weights that chose it, after
    temperature and under `grammar`."""

    weight_versions: np.ndarray
    """int64 [T], number of updates applied to the weights that chose each token."""

    finish_reason: FinishReason

    temperature: float | None = None
    """Temperature of `log_probs`, recorded by the policy that an agent gets, or by an engine whose greedy
    replies have another than was asked for; None: that of the episode's own sampling."""

    grammar: str | None = None
    """Grammar that sampling was restricted to, in llguidance's dialect of Lark; None: every token
    could be sampled."""

    stopped_by: str | None = None
    """The stop text of `ReplyOptions.stop` that ended the reply."""

    report: tuple[TokenReport, ...] | None = None
    """One entry for each token, if `ReplyOptions.top_log_probs` asked for them."""

    images: tuple[np.ndarray, ...] = ()
    """Images of the prompt in their order, uint8 [H, W, 3]."""

    image_starts: tuple[int, ...] = ()
    """Place of each image's first token in the prompt."""


class LanguagePolicy(Protocol):
    """A policy that replies to conversations; it batches the requests that wait."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply.

        Without `sampling`, the episode's own is used. The seed is always this decision's.

        Without `max_tokens`, the engine's own limit applies. Cancelling the call aborts the
        generation.

        Raises: ContextOverflow if the prompt leaves no room for a reply; ValueError for a prompt or
        options that are not supported, such as a schema that no grammar can express.
        """
        ...


LanguagePolicies: TypeAlias = LanguagePolicy | Mapping[str, LanguagePolicy]
"""Policies of a conversation: one for all agents, or one for each agent by its name."""


class TextStart(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The start of a text episode."""

    messages: tuple[Message, ...]
    """The conversation of the agent whose turn it is, from its beginning."""

    tools: tuple[ToolSpec, ...] = ()

    agent: str = DEFAULT_AGENT
    """The agent whose turn it is."""

    options: ReplyOptions = ANY_REPLY
    """Rules for the reply to these messages."""


class TextOutcome(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The result of a reply, and the next turn.

    Example:
        The reply was right, and ended the episode:

        TextOutcome(messages=(), reward=1.0, terminated=True, truncated=False, info={"is_success": True})
    """

    messages: tuple[Message, ...]
    """Appended to the conversation of `agent`, which begins with them if it had no turn yet."""

    reward: float
    """Reward of the agent that replied, for this reply."""

    credits: dict[str, float] = {}
    """Further rewards by agent name, for earlier actions."""

    terminated: bool
    """Whether the task ended the episode."""

    truncated: bool
    """Whether a limit ended the episode, such as a limit of turns."""

    info: dict[str, Any]
    """`info["is_success"]` is a bool if the task can report success."""

    agent: str = DEFAULT_AGENT
    """The agent whose turn is next."""

    tools: tuple[ToolSpec, ...] = ()
    """Tools of that agent from now on; empty: the same as before."""

    options: ReplyOptions = ANY_REPLY
    """Rules for the reply to these messages."""


class TextEnv(Protocol):
    """One text environment, leased for one episode.

    Its methods run in the event loop; work that may hang, crash or be hostile (tools, code,
    scorers) runs in child processes that can be killed.
    """

    @property
    def episode(self) -> EpisodeSpec:
        """The episode that this lease is for."""
        ...

    async def reset(self) -> TextStart:
        """Reset the environment to the start of its episode."""
        ...

    async def step(self, message: Message) -> TextOutcome:
        """Pass on the reply of the agent whose turn it was."""
        ...
