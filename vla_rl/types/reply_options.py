"""The options of one reply: its format, its stop texts, the tools that it may call.

A format restricts sampling: tokens that would break it get probability 0 and the others are
renormalised. The log-probs of such a reply are those of the restricted distribution.
`Completion.grammar` records the restriction, so that a learner computes the same log-probs.
"""

from typing import Any, Literal, TypeAlias

import msgspec


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
    """The tools that a reply may or must call."""

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
