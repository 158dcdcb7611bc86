"""How one reply is asked for, besides its sampling: the form it must have, where it stops, which tools it may call.

A format restricts sampling itself: tokens that would break it get probability 0 and the others are renormalised. The
log-probs of such a reply are those of the restricted distribution, and `Completion.grammar` records the restriction, so that
a learner computes the same ones.
"""

from typing import Any, Literal, TypeAlias

import msgspec


class JsonFormat(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """The reply is one JSON value."""

    schema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object"})
    """JSON schema that it satisfies; by default any object."""

    is_strict: bool = True
    """Refuse a schema with a keyword that no grammar can express; False: such keywords are ignored."""


class RegexFormat(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    """The reply matches a regular expression from its first to its last character."""

    pattern: str
    """In the syntax of Rust's `regex`, without look-around."""


class ChoiceFormat(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """The reply is one of several texts."""

    choices: tuple[str, ...]


class GrammarFormat(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """The reply is a sentence of a context-free grammar."""

    lark: str
    """In llguidance's dialect of Lark; its first rule is `start`."""


ReplyFormat: TypeAlias = JsonFormat | RegexFormat | ChoiceFormat | GrammarFormat


class ToolRule(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a reply calls tools, and which."""

    mode: Literal["auto", "none", "required"] = "auto"
    """`auto`: the model decides. `none`: the reply is read as text. `required`: the reply is one or more calls."""

    names: tuple[str, ...] = ()
    """Tools that may be called; empty: all that the request gives."""

    max_calls: int | None = None
    """Most calls in one reply; None: any number."""


class ReplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for one reply."""

    format: ReplyFormat | None = None
    """Form of the reply's text; None: any. Tool calls, where `tools` allows them, are replies too."""

    stop: tuple[str, ...] = ()
    """The reply ends with the first of these texts; the message holds what came before it, the tokens hold it too."""

    tools: ToolRule = ToolRule()

    top_log_probs: int | None = None
    """Report the text of every token, and this many of the most likely tokens in its place; None: no report."""


ANY_REPLY = ReplyOptions()
"""No rule at all."""
