"""Options of a reply as a grammar over its text, in llguidance's dialect of Lark.

    reply ::= tool calls, or text in the format that was asked for
    call  ::= <tool_call> {"name": one of the tools, "arguments": what its schema allows} </tool_call>

A grammar is made only if one is needed: a reply that may be any text, with calls of any kind, has none, and its distribution
is the model's own.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from llguidance import regex_to_lark

from vla_rl.models.language.chat_format import CLOSE_CALL, OPEN_CALL
from vla_rl.types import ChoiceFormat, GrammarFormat, JsonFormat, ReplyFormat, ReplyOptions, ToolSpec

_HEAD: Final = "%llguidance {}"
"""First line, from which llguidance and vLLM recognise the dialect."""

_WHITE: Final = r"[ \t\r\n]{0,32}"
"""White space around the commas and colons of JSON: a line break and an indentation. Without a bound a policy that has
learnt little fills its whole reply with it."""

_SPACE: Final = f"SPACE: /{_WHITE}/"

_PLAIN: Final = ("enum", "const", "default", "examples", "required", "x-guidance")
"""Keywords of a schema that hold values and no schemas."""

_PROSE: Final = f"PROSE: /(?s:.*)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/"
"""Text in which no call begins."""


def reply_grammar(options: ReplyOptions, tools: Sequence[ToolSpec], marker: Callable[[str], str]) -> str | None:
    """The grammar of all replies that satisfy the options; None if every reply does.

    Args:
        options: of the reply.
        tools: that the prompt describes.
        marker: gives the terminal for the text that begins or ends a call.

    Raises: ValueError for tools that may be called and were not given, or a grammar beside tools.
    """
    allowed = _allowed_tools(options, tools)
    wanted, is_required = options.format, options.tools.mode == "required"
    if isinstance(wanted, GrammarFormat):
        if allowed:
            raise ValueError("a grammar and tools were given, expected one of them; write the calls into the grammar")
        return wanted.lark
    if not allowed:
        return None if wanted is None else "\n".join([_HEAD, "start: text", _text_rule(wanted)])
    if not is_required and wanted is None and not _needs_grammar(options, allowed, tools):
        return None
    rules = [_HEAD, _SPACE, *_call_rules(allowed, marker)]
    if is_required:
        rules.append(f"start: {_calls(options.tools.max_calls)}")
    elif wanted is None:
        more = "*" if options.tools.max_calls is None else "?"
        rules += [_PROSE, f"start: PROSE{f' (call PROSE){more}' * (options.tools.max_calls or 1)}"]
    else:
        rules += [_text_rule(wanted), f"start: text | {_calls(options.tools.max_calls)}"]
    return "\n".join(rules)


def _allowed_tools(options: ReplyOptions, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    rule = options.tools
    if rule.mode == "none":
        return []
    known = {tool.name for tool in tools}
    if missing := sorted(set(rule.names) - known):
        raise ValueError(f"tools {missing} were asked for but not given, expected some of {sorted(known)}")
    if rule.mode == "required" and not tools:
        raise ValueError("a tool call is required but no tools were given, expected at least one")
    return [tool for tool in tools if not rule.names or tool.name in rule.names]


def _needs_grammar(options: ReplyOptions, allowed: Sequence[ToolSpec], tools: Sequence[ToolSpec]) -> bool:
    """Whether a reply that is sampled freely may break a rule."""
    return options.tools.max_calls is not None or len(allowed) < len(tools) or any(tool.is_strict for tool in allowed)


def _calls(max_calls: int | None) -> str:
    """One call or more, with nothing else around them."""
    more = "(call SPACE)*" if max_calls is None else "(call SPACE)? " * (max_calls - 1)
    return f"SPACE call SPACE {more}"


def _call_rules(tools: Sequence[ToolSpec], marker: Callable[[str], str]) -> list[str]:
    rules = [
        f"call: {marker(OPEN_CALL)} SPACE ({' | '.join(f'tool_{number}' for number in range(len(tools)))}) SPACE "
        f"{marker(CLOSE_CALL)}"
    ]
    for number, tool in enumerate(tools):
        name = _literal(json.dumps(tool.name, ensure_ascii=False))
        # the schema stands alone, as its references count from its own root
        rules += [
            rf'tool_{number}: "{{" SPACE "\"name\"" SPACE ":" SPACE {name} SPACE "," SPACE "\"arguments\"" SPACE ":" SPACE '
            rf'arguments_{number} SPACE "}}"',
            f"arguments_{number}: {_json(tool.parameters or {'type': 'object'}, is_strict=tool.is_strict)}",
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
    """Keywords that no grammar can express are refused if it is strict, and ignored otherwise. What the schema itself tells
    llguidance has the last word."""
    rules = {
        "whitespace_flexible": False,
        "item_separator": f"{_WHITE},{_WHITE}",
        "key_separator": f"{_WHITE}:{_WHITE}",
        "lenient": not is_strict,
    }
    closed = schema if "allOf" in json.dumps(schema) else _closed(schema)
    return f"%json {json.dumps({**closed, 'x-guidance': {**rules, **schema.get('x-guidance', {})}})}"


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it describes, unless it says otherwise.

    What satisfies it satisfies the schema as it was given, except under `allOf`. A policy that has learnt little would
    otherwise go on to invent properties.
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
