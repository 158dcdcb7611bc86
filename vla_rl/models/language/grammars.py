"""Grammars of replies, in llguidance's dialect of Lark.

    reply ::= tool calls, or text in the requested format
    call  ::= <tool_call> {"name": one of the tools, "arguments": what its schema allows} </tool_call>

A grammar is made only if needed: a reply that may be any text, with calls of any kind, has none,
and its distribution is the model's own. The learner forbids the same tokens in recorded replies
(`mask_forbidden_tokens`), so that training matches sampling.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from llguidance import regex_to_lark
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import Vocabulary, forbidden
from vla_rl.models.language.chat_format import CLOSE_CALL, OPEN_CALL
from vla_rl.models.language.rows import Forbidden
from vla_rl.types import (
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    ReplyFormat,
    ReplyOptions,
    ToolSpec,
)

_HEAD: Final = "%llguidance {}"
"""First line, from which llguidance and vLLM recognise the dialect."""

_WHITE: Final = r"[ \t\r\n]{0,32}"
"""White space around the commas and colons of JSON: a line break and an indentation. It is bounded
because a policy that has learnt little would fill its whole reply with white space.
"""

_SPACE: Final = f"SPACE: /{_WHITE}/"

_PLAIN: Final = ("enum", "const", "default", "examples", "required", "x-guidance")
"""Schema keywords whose contents are values, not schemas."""

_PROSE: Final = f"PROSE: /(?s:.*)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/"
"""Text in which no call begins."""


def reply_grammar(
    options: ReplyOptions, tools: Sequence[ToolSpec], marker: Callable[[str], str]
) -> str | None:
    """Return the grammar of all replies that satisfy the options; None if every reply does.

    Args:
        options: options of the reply.
        tools: tools that the prompt describes.
        marker: returns the terminal for the text that begins or ends a call.

    Raises: ValueError if tools that may be called were not given, or if both a grammar and tools
    were given.
    """
    allowed = _allowed_tools(options, tools)
    wanted, is_required = options.format, options.tools.mode == "required"
    if isinstance(wanted, GrammarFormat):
        if allowed:
            raise ValueError(
                "a grammar and tools were given, expected only one of them; write the calls into "
                "the grammar"
            )
        return wanted.lark
    if not allowed:
        return None if wanted is None else "\n".join([_HEAD, "start: text", _text_rule(wanted)])
    if not is_required and wanted is None and not _needs_grammar(options, allowed, tools):
        return None
    # From here on the reply is restricted, so its distribution is no longer the model's own.
    rules = [_HEAD, _SPACE, *_call_rules(allowed, marker)]
    if is_required:
        rules.append(f"start: {_calls(options.tools.max_calls)}")
    elif wanted is None:
        more = "*" if options.tools.max_calls is None else "?"
        rules += [_PROSE, f"start: PROSE{f' (call PROSE){more}' * (options.tools.max_calls or 1)}"]
    else:
        rules += [_text_rule(wanted), f"start: text | {_calls(options.tools.max_calls)}"]
    return "\n".join(rules)


def spell_marker(text: str, tokenizer: Any, vocabulary: Vocabulary) -> str:
    """Return the terminal of a grammar for a text that delimits tool calls."""
    # A special token is matched by its id: spelt out, its letters would be other tokens, and the
    # grammar would forbid every call.
    token = tokenizer.get_vocab().get(text)
    is_special = token is not None and vocabulary.is_special(token)
    return f"<[{token}]>" if is_special else json.dumps(text)


def _allowed_tools(options: ReplyOptions, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    rule = options.tools
    if rule.mode == "none":
        return []
    known = {tool.name for tool in tools}
    if missing := sorted(set(rule.names) - known):
        raise ValueError(
            f"tools {missing} were requested but not given, expected some of {sorted(known)}"
        )
    if rule.mode == "required" and not tools:
        raise ValueError("a tool call is required but no tools were given, expected at least one")
    return [tool for tool in tools if not rule.names or tool.name in rule.names]


def _needs_grammar(
    options: ReplyOptions, allowed: Sequence[ToolSpec], tools: Sequence[ToolSpec]
) -> bool:
    """Return whether a reply that is sampled freely may break a rule."""
    return (
        options.tools.max_calls is not None
        or len(allowed) < len(tools)
        or any(tool.is_strict for tool in allowed)
    )


def _calls(max_calls: int | None) -> str:
    """Return the rule for one or more calls, with nothing else around them."""
    more = "(call SPACE)*" if max_calls is None else "(call SPACE)? " * (max_calls - 1)
    return f"SPACE call SPACE {more}"


def _call_rules(tools: Sequence[ToolSpec], marker: Callable[[str], str]) -> list[str]:
    rules = [
        f"call: {marker(OPEN_CALL)} SPACE "
        f"({' | '.join(f'tool_{number}' for number in range(len(tools)))}) SPACE "
        f"{marker(CLOSE_CALL)}"
    ]
    for number, tool in enumerate(tools):
        name = _literal(json.dumps(tool.name, ensure_ascii=False))
        # each schema is compiled separately, because its references count from its own root
        rules += [
            rf'tool_{number}: "{{" SPACE "\"name\"" SPACE ":" SPACE {name} SPACE "," SPACE '
            r'"\"arguments\"" SPACE ":" SPACE '
            rf'arguments_{number} SPACE "}}"',
            f"arguments_{number}: "
            f"{_json(tool.parameters or {'type': 'object'}, is_strict=tool.is_strict)}",
        ]
    return rules


def _text_rule(wanted: ReplyFormat) -> str:
    if isinstance(wanted, JsonFormat):
        return f"text: {_json(wanted.schema, is_strict=wanted.is_strict)}"
    if isinstance(wanted, ChoiceFormat):
        return f"text: {' | '.join(map(_literal, wanted.choices))}"
    assert not isinstance(wanted, GrammarFormat)
    return f"text: /{regex_to_lark(wanted.pattern)}/"


def _json(schema: dict[str, Any], *, is_strict: bool) -> str:
    """Return a schema as a grammar rule. Keywords that no grammar can express are rejected if it is
    strict, else ignored. The schema's own `x-guidance` settings take precedence.
    """
    rules = {
        "whitespace_flexible": False,
        "item_separator": f"{_WHITE},{_WHITE}",
        "key_separator": f"{_WHITE}:{_WHITE}",
        "lenient": not is_strict,
    }
    # Closing the parts of an allOf would forbid what another part allows.
    closed = schema if "allOf" in json.dumps(schema) else _closed(schema)
    return (
        f"%json {json.dumps({**closed, 'x-guidance': {**rules, **schema.get('x-guidance', {})}})}"
    )


def _closed(schema: Any) -> Any:
    """Close the schema's objects to properties that it does not describe, unless it sets this
    itself.

    Whatever satisfies the result satisfies the original schema, except under `allOf`. Otherwise a
    policy that has learnt little would invent properties without end.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: value if name in _PLAIN else _closed(value) for name, value in schema.items()}
    describes = isinstance(schema.get("properties"), dict) and "patternProperties" not in schema
    return {"additionalProperties": False, **inner} if describes else inner


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def mask_forbidden_tokens(
    replies: Sequence[Tensor],
    grammars: Sequence[Sequence[tuple[int, int, str]]],
    vocabulary: Vocabulary,
    *,
    device: torch.device,
) -> Forbidden:
    """Return which tokens were forbidden at the positions of replies that lie end to end.

    Args:
        replies: tokens of each reply, int64 [T].
        grammars: parts (start, stop, grammar) of each reply that were sampled under a grammar.
        vocabulary: the tokenizer's tokens.
        device: device of the masks.
    """
    begins = [0, *itertools.accumulate(len(reply) for reply in replies)]
    ruled = [
        (begins[row] + start, vocabulary.allowed_masks(grammar, replies[row][start:stop].tolist()))
        for row, parts in enumerate(grammars)
        for start, stop, grammar in parts
    ]
    num_logits = vocabulary.num_logits

    def found(first: int, end: int) -> Tensor | None:
        if not ruled:
            return None
        # Only the chunk's rows: a mask of all positions would take as much memory as the logits
        # that chunks avoid.
        is_forbidden = torch.zeros((end - first, num_logits), dtype=torch.bool, device=device)
        for start, masks in ruled:
            low, high = max(first, start), min(end, start + len(masks))
            if low < high:
                part = to_device(masks[low - start : high - start], device)
                is_forbidden[low - first : high - first] = forbidden(part, num_logits)
        return is_forbidden

    return found
