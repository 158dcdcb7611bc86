"""Rules for replies in requests: tools, which of them to call, format, and stop texts.

`chat/completions` and `responses` nest the same fields differently; this module interprets them.
"""

from typing import Any, Final

import msgspec

from vla_rl.endpoint.apis.fields import refuse
from vla_rl.endpoint.errors import RequestError
from vla_rl.types import (
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ReplyFormat,
    ToolRule,
    ToolSpec,
)
from vla_rl.util.values import excerpt

MOST_STOPS: Final = 16
MOST_CHOICES: Final = 128
MOST_ALTERNATIVES: Final = 20


class Function(msgspec.Struct):
    """A tool in OpenAI's format."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def spec(self) -> ToolSpec:
        """Return the tool in the types of vla_rl."""
        return ToolSpec(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {},
            is_strict=bool(self.strict),
        )


class JsonSchema(msgspec.Struct):
    """The schema of a structured output, in OpenAI's format."""

    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def format(self) -> JsonFormat:
        """The form of a reply."""
        if self.schema is None:
            return JsonFormat()
        return JsonFormat(schema=self.schema, is_strict=bool(self.strict))


def tool_rule(
    param: str, choice: Any, parallel: bool | None, tools: tuple[ToolSpec, ...]
) -> ToolRule:
    """Return the tools that a reply may call.

    Args:
        param: name of the field, for errors.
        choice: "auto", "none", "required", one named function, or a list of allowed ones; functions
            are named at the top, or one level below under "function".
        parallel: whether one reply may hold several calls; None: yes.
        tools: the tools of the request.

    Raises: RequestError, naming the missing tool or the unsupported choice.
    """
    max_calls = 1 if parallel is False and tools else None
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise refuse(param, choice, "'auto' or 'none' without tools; give at least one tool")
        return ToolRule(mode=choice or "auto", max_calls=max_calls)
    mode: Any = "required"
    named: Any = [choice]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict):
            raise refuse(f"{param}.allowed_tools", allowed, "an object with mode and tools")
        mode, named = allowed.get("mode", "auto"), allowed.get("tools", [])
        if not isinstance(named, list):
            raise refuse(f"{param}.tools", named, "a list of tools")
    elif kind == "function":
        max_calls = 1
    else:
        raise refuse(param, choice, "'auto', 'none', 'required', a function or allowed_tools")
    names = tuple(_tool_name(param, each) for each in named)
    known = {tool.name: None for tool in tools}
    for name in names:
        if name not in known:
            raise refuse(
                param,
                name,
                f"the name of a tool of this request, which are {excerpt(list(known))}",
            )
    if mode not in ("auto", "required"):
        raise refuse(f"{param}.mode", mode, "'auto' or 'required'")
    return ToolRule(mode=mode, names=names, max_calls=max_calls)


def _tool_name(param: str, named: Any) -> str:
    """Return the name of a tool in a choice, at its top or below "function"."""
    function = named.get("function", named) if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(param, named, 'a tool such as {"type": "function", "name": ...}')
    return name


def text_format(param: str, kind: str, schema: JsonSchema | None) -> ReplyFormat | None:
    """Return the format in `response_format` or `text.format`.

    Raises: RequestError for an unknown one.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonFormat()
    if kind == "json_schema":
        if schema is None:
            raise RequestError(f"{param}.json_schema is missing", param=f"{param}.json_schema")
        return schema.format()
    raise refuse(f"{param}.type", kind, "'text', 'json_object' or 'json_schema'")


class StructuredOutputs(msgspec.Struct):
    """vLLM's extension of OpenAI's API; exactly one field is set."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def format(self) -> ReplyFormat:
        """Return the format of a reply. Raises: RequestError unless exactly one field is set."""
        found: list[ReplyFormat] = []
        if self.json is not None:
            found.append(JsonFormat(schema=self.json))
        if self.regex is not None:
            found.append(RegexFormat(pattern=self.regex))
        if self.choice is not None:
            found.append(ChoiceFormat(choices=tuple(self.choice)))
        if self.grammar is not None:
            found.append(GrammarFormat(lark=self.grammar))
        if len(found) != 1:
            raise RequestError(
                f"structured_outputs has {len(found)} of json, regex, choice and grammar, "
                "expected one",
                param="structured_outputs",
            )
        return found[0]


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the texts that end a reply. Raises: RequestError for too many or an empty one."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > MOST_STOPS:
        raise refuse("stop", len(texts), f"at most {MOST_STOPS} texts")
    if "" in texts:
        raise refuse("stop", "", "texts of at least one character")
    return texts


def require_range(param: str, value: int | None, least: int, most: int | None = None) -> None:
    """Raise RequestError if a number is given and out of its range."""
    if value is not None and (value < least or (most is not None and value > most)):
        raise refuse(param, value, f"at least {least}" if most is None else f"{least} to {most}")
