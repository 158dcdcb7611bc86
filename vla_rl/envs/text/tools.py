"""Tools that a model may call, with checked arguments, a deadline, an answer in every case.

A tool is a function with type hints and a docstring. An `async def` runs in the event loop and must
not block it; a plain `def` at the top of a module runs in a child process, is killed at its
deadline, and may block or crash until then. Type hints and docstring give the description for the
model:

    def find(query: str, limit: int = 3) -> list[str]:
        \"\"\"Find pages about something.

        Args:
            query: what to look for.
            limit: pages at most.
        \"\"\"

has the schema {"query": string, required; "limit": integer, default 3}, with those words as
descriptions.
"""

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, get_type_hints

import msgspec
import numpy as np

from vla_rl.envs.text.task import TextLimits
from vla_rl.sandbox import Fault, ProcessLimits, Sandbox, function_path
from vla_rl.types import Message, ToolCall, ToolSpec
from vla_rl.util.foreign_data import repair_unicode
from vla_rl.util.tasks import TookTooLong, is_being_cancelled, limit_time
from vla_rl.util.values import excerpt

MAX_NAME_CHARACTERS: Final = 100
"""Characters of a name that are compared with the tools' names, which have 64 at most."""

MAX_ERROR_CHARACTERS: Final = 400
"""Characters of an error about arguments that the model reads; the error may repeat them."""

ToolFault: TypeAlias = Literal["unknown_tool", "bad_arguments"] | Fault


class ToolAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a tool call.

    Example:
        ToolAnswer(text="81")
        ToolAnswer(text="error: there is no tool 'calk'; did you mean 'calc'?", fault="unknown_tool")
    """

    text: str
    """Text for the model: the result, or the error."""

    fault: ToolFault | None = None
    """Kind of fault; None if the tool ran to its end."""


class Tool:
    """One tool.

    Args:
        function: function with type hints and a docstring.

    Raises: TypeError for a function that cannot be a tool, naming what is missing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.arguments_type: Any = make_arguments_type(function)
        self.spec = make_tool_spec(function, self.arguments_type)
        self.runs_in_loop = inspect.iscoroutinefunction(function)
        self.path = "" if self.runs_in_loop else function_path(function)


class SchemaTool(Tool):
    """A tool that another program describes and checks, such as a server of MCP.

    Args:
        spec: its name, description and JSON schema.
        call: `async def call(name, arguments)`, which returns text or what JSON can hold.
    """

    def __init__(
        self, spec: ToolSpec, call: Callable[[str, dict[str, Any]], Awaitable[Any]]
    ) -> None:
        self.function, self._call = self, call
        # Only that it is an object is checked here: a schema of another program may have any
        # keyword, and the program checks it again.
        self.arguments_type = dict[str, Any]
        self.spec = spec
        self.runs_in_loop, self.path = True, ""

    async def __call__(self, **arguments: Any) -> Any:
        """Call the other program."""
        return await self._call(self.spec.name, arguments)


class Toolbox:
    """The tools of one agent in one episode.

    Args:
        functions: the tools: functions, or a `SchemaTool` for what another program describes.
        sandbox: processes in which plain functions run.
        limits: `tool_timeout_s` and `max_answer_characters` apply here.

    Raises: TypeError for a function that cannot be a tool; ValueError for two of one name.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        sandbox: Sandbox,
        limits: TextLimits | None = None,
    ) -> None:
        self._tools: dict[str, Tool] = {}
        self._sandbox = sandbox
        self._limits = limits if limits is not None else TextLimits()
        self._process_limits = ProcessLimits(timeout_s=self._limits.tool_timeout_s)
        for function in functions:
            tool = function if isinstance(function, Tool) else Tool(function)
            if tool.spec.name in self._tools:
                raise ValueError(f"two tools are named {tool.spec.name!r}; rename one of them.")
            self._tools[tool.spec.name] = tool

    def list_tools(self) -> tuple[ToolSpec, ...]:
        """Return the descriptions of the tools for the model."""
        return tuple(tool.spec for tool in self._tools.values())

    async def aexecute(self, name: str, arguments: str | Mapping[str, Any]) -> ToolAnswer:
        """Call a tool with JSON text, or with an object.

        Errors of the call, or of the tool, are in the answer.
        """
        tool = self._tools.get(name)
        if tool is None:
            return ToolAnswer(
                text=f"error: there is no tool {excerpt(name)}; {self._nearest(name)}",
                fault="unknown_tool",
            )
        try:
            if isinstance(arguments, str):
                given = msgspec.json.decode(arguments or "{}", type=tool.arguments_type)
            else:
                given = msgspec.convert(dict(arguments), tool.arguments_type)
        except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
            # The error may repeat the argument, which may be the whole reply.
            words = shorten(str(error), MAX_ERROR_CHARACTERS)
            text = f"error: wrong arguments for {name!r}: {words}; expected {_describe_arguments(tool)}"
            return ToolAnswer(text=text, fault="bad_arguments")
        answer = await (
            self._in_loop(tool, given) if tool.runs_in_loop else self._in_process(tool, given)
        )
        return msgspec.structs.replace(
            answer, text=shorten(answer.text, self._limits.max_answer_characters)
        )

    async def answer(self, call: ToolCall) -> tuple[Message, ToolAnswer]:
        """Return the tool message that answers a call, and its result."""
        answer = await self.aexecute(call.name, call.arguments)
        return Message(
            role="tool", content=answer.text, tool_call_id=call.id, name=call.name
        ), answer

    async def _in_loop(self, tool: Tool, given: Any) -> ToolAnswer:
        try:
            work = tool.function(**_fields(given))
            return ToolAnswer(text=as_text(await limit_time(self._limits.tool_timeout_s, work)))
        except TookTooLong:
            text = (
                f"error: {tool.spec.name!r} took longer than {self._limits.tool_timeout_s:g} s "
                "and was stopped"
            )
            return ToolAnswer(text=text, fault="timed_out")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            # The tool's own await was cancelled, and not this episode, which goes on.
            return _describe_error(error)
        except (
            BaseException
        ) as error:  # the model reads it: also sys.exit, or a panic of an extension
            return _describe_error(error)

    async def _in_process(self, tool: Tool, given: Any) -> ToolAnswer:
        result = await self._sandbox.call(
            tool.path, _fields(given), self._process_limits, is_converted=True
        )
        if result.fault is not None:
            return ToolAnswer(text=f"error: {result.text}", fault=result.fault)
        try:
            return ToolAnswer(text=as_text(result.value))
        except (TypeError, ValueError, RecursionError) as error:
            return _describe_error(error)

    def _nearest(self, name: str) -> str:
        if not self._tools:
            return "there are no tools"
        # The comparison takes time with the square of the length, and a policy may write any name.
        near = difflib.get_close_matches(name[:MAX_NAME_CHARACTERS], self._tools, n=1, cutoff=0.4)
        return (
            f"did you mean {near[0]!r}? " if near else ""
        ) + f"there are: {', '.join(sorted(self._tools))}"


def as_text(value: Any) -> str:
    """Return a tool's result as the model reads it: text unchanged, all else as JSON.

    An object that JSON has no form for is written in its own words, if its class has any. Half a
    surrogate pair, as in a file name that is not UTF-8, becomes U+FFFD.

    Raises: TypeError or ValueError for a value that is neither.
    """
    if isinstance(value, str):
        return repair_unicode(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        plain = msgspec.to_builtins(value, enc_hook=_encode_other)
    if not isinstance(plain, str):
        plain = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    return repair_unicode(plain)


def _encode_other(value: Any) -> Any:
    """Return a value that JSON has a form for.

    Raises: TypeError for an object whose class describes itself in no words.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    kind: Any = type(value)
    has_words = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    # Python's `<object at 0x...>` tells a model nothing, so that it is a fault of the tool.
    if not has_words or callable(value) or inspect.isawaitable(value):
        raise TypeError(f"the tool returned a {kind.__name__}, expected text or what JSON can hold")
    return str(value)


def _describe_error(error: BaseException) -> ToolAnswer:
    """Return the answer for an error of a tool, whose own words may fail as well."""
    try:
        words = str(error)
    except Exception as failure:
        words = f"(its __str__ raised {type(failure).__name__})"
    return ToolAnswer(
        text=repair_unicode(f"error: {type(error).__name__}: {words}"), fault="raised"
    )


def shorten(text: str, most: int) -> str:
    """Cut `text` to `most` characters if it is longer, with a note."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[{len(text) - most} more characters were left out]"


def _fields(given: msgspec.Struct | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    return {field: getattr(given, field) for field in given.__struct_fields__}


def _describe_arguments(tool: Tool) -> str:
    """Describe a tool's arguments: `{"query": string, "limit": integer (optional)}`."""
    required = set(tool.spec.parameters.get("required", ()))
    parts = [
        f'"{name}": {schema.get("type", "any")}' + ("" if name in required else " (optional)")
        for name, schema in tool.spec.parameters.get("properties", {}).items()
    ]
    return "{" + ", ".join(parts) + "}"


_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):")


def make_arguments_type(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Return a struct with one field for each parameter, closed to unknown ones.

    Decoding into it checks a call's arguments.

    Raises: TypeError for a parameter without a type hint, `*args`, or a hint that JSON cannot
    represent.
    """
    hints = get_type_hints(function, include_extras=True)
    words = _parameter_descriptions(inspect.getdoc(function) or "")
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        fields.append(_argument_field(function, parameter, hints, words))
    made = msgspec.defstruct(
        _tool_name(function), fields, kw_only=True, forbid_unknown_fields=True, frozen=True
    )
    try:
        msgspec.json.schema(made)
    except TypeError as error:
        raise TypeError(
            f"tool {_tool_name(function)!r} has a type hint that JSON cannot represent: {error}"
        ) from error
    return made


def make_tool_spec(function: Callable[..., Any], arguments: type[msgspec.Struct]) -> ToolSpec:
    """Describe the tool for the model. Raises: TypeError for a tool without a docstring."""
    name = _tool_name(function)
    description = _description(inspect.getdoc(function) or "")
    if not description:
        raise TypeError(
            f"tool {name!r} has no docstring; add one, because it describes the tool to the model."
        )
    (whole,), components = msgspec.json.schema_components(
        [arguments], ref_template="#/$defs/{name}"
    )
    parameters = dict(components.pop(whole["$ref"].rsplit("/", 1)[1]))
    parameters.pop("title", None)
    if components:
        parameters["$defs"] = components
    return ToolSpec(name=name, description=description, parameters=parameters)


def _tool_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.match(name):
        raise TypeError(
            f"a tool is named {name!r}, expected letters, digits and underscores; give it a `def`."
        )
    return name


def _argument_field(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    hints: dict[str, Any],
    words: dict[str, str],
) -> Any:
    label = f"parameter {parameter.name!r} of tool {_tool_name(function)!r}"
    if parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
        parameter.POSITIONAL_ONLY,
    ):
        raise TypeError(
            f"{label} is {parameter.kind.description}, expected parameters that can "
            "be given by name."
        )
    if parameter.name not in hints:
        raise TypeError(
            f"{label} has no type hint; add one, because it describes the argument to the model."
        )
    hint = hints[parameter.name]
    if parameter.name in words:
        hint = Annotated[hint, msgspec.Meta(description=words[parameter.name])]
    if parameter.default is parameter.empty:
        return (parameter.name, hint)
    return (parameter.name, hint, parameter.default)


def _description(docstring: str) -> str:
    """Return the docstring up to its first section."""
    kept = []
    for line in docstring.splitlines():
        if _SECTION.match(line):
            break
        kept.append(line)
    return "\n".join(kept).strip()


def _parameter_descriptions(docstring: str) -> dict[str, str]:
    """Return the description of each parameter from the section `Args:`.

    One line, or more that are indented further.
    """
    words: dict[str, str] = {}
    section, current = "", ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            section, current = match.group(1), ""
        elif section in ("Args", "Arguments") and (
            entry := re.match(r"^ {2,4}(\w+)(?: \([^)]*\))?: *(.*)$", line)
        ):
            current = entry.group(1)
            words[current] = entry.group(2)
        elif current and line.strip():
            words[current] = f"{words[current]} {line.strip()}".strip()
    return words
