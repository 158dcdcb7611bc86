"""Build a tool's description and argument schema from its type hints and docstring.

    def find(query: str, limit: int = 3) -> list[str]:
        \"\"\"Find pages about something.

        Args:
            query: what to look for.
            limit: pages at most.
        \"\"\"

gives the schema {"query": string, required; "limit": integer, default 3}, with those words as
descriptions.
"""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import msgspec

from vla_rl.types import ToolSpec

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):")


def arguments_type(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Return a struct with one field for each parameter, closed to unknown ones.

    Decoding into it checks a call's arguments.

    Raises: TypeError for a parameter without a type hint, `*args`, or a hint that JSON cannot
    represent.
    """
    hints = get_type_hints(function, include_extras=True)
    words = _parameter_words(inspect.getdoc(function) or "")
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        fields.append(_field_of(function, parameter, hints, words))
    made = msgspec.defstruct(
        _name_of(function), fields, kw_only=True, forbid_unknown_fields=True, frozen=True
    )
    try:
        msgspec.json.schema(made)
    except TypeError as error:
        raise TypeError(
            f"tool {_name_of(function)!r} has a type hint that JSON cannot represent: {error}"
        ) from error
    return made


def tool_spec(function: Callable[..., Any], arguments: type[msgspec.Struct]) -> ToolSpec:
    """Describe the tool for the model. Raises: TypeError for a tool without a docstring."""
    name = _name_of(function)
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


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.match(name):
        raise TypeError(
            f"a tool is named {name!r}, expected letters, digits and underscores; give it a `def`."
        )
    return name


def _field_of(
    function: Callable[..., Any],
    parameter: inspect.Parameter,
    hints: dict[str, Any],
    words: dict[str, str],
) -> Any:
    label = f"parameter {parameter.name!r} of tool {_name_of(function)!r}"
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


def _parameter_words(docstring: str) -> dict[str, str]:
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
