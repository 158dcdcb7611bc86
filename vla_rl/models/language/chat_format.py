"""Messages as text, by a tokenizer's own chat template.

A conversation is rendered to a prompt, and a reply is parsed back into a message.

Tool calls have the format of Hermes models (and of Qwen's after them):
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them after or between the
text. A call that cannot be parsed is left in the text, and `Message.call_errors` holds the reason.
Nothing is raised, because the model has to learn from it.
"""

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from jinja2 import TemplateError

from vla_rl.errors import CheckpointError, ConversationRejected
from vla_rl.types import Message, ToolCall, ToolSpec
from vla_rl.util.foreign_data import find_spans, repair_unicode
from vla_rl.util.values import excerpt

OPEN_CALL: Final = "<tool_call>"
CLOSE_CALL: Final = "</tool_call>"

TOOLS_TEXT: Final = (
    "You may call these tools:\n<tools>\n{tools}\n</tools>\n"
    f'A call is {OPEN_CALL}{{{{"name": ..., "arguments": {{{{...}}}}}}}}{CLOSE_CALL}'
)
"""Description of tools for a template that has none."""

_ANY_TOOL: Final = ToolSpec(name="any", description="", parameters={})

MAX_NESTING: Final = 100
"""Most objects and lists inside each other in a call's arguments; templates and tools walk them by
recursion."""

MOST_ROLES: Final = 8
MOST_WORDS: Final = 400
"""Messages and characters of a rejection that its error repeats."""

_log = logging.getLogger(__name__)

_EXPECTED: Final = 'expected {"name": ..., "arguments": {...}}'


class ChatFormat:
    """The chat template of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        stop_tokens: tokens that end a reply; they are not part of its text.
        template: another chat template than the tokenizer's, or several by name.

    Raises: CheckpointError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        template: str | Mapping[str, str] | None = None,
    ) -> None:
        self._template = template
        if not (template or getattr(tokenizer, "chat_template", None)):
            raise CheckpointError(
                "the tokenizer has no chat template, expected one; put chat_template.jinja beside its files, or "
                "take a checkpoint that was trained to chat."
            )
        self._tokenizer, self._stop_tokens = tokenizer, stop_tokens

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """Render the prompt of the next reply, int64 [P].

        Raises: ConversationRejected, a ValueError, if the template rejects the conversation.
        """
        return self._tokens(self.render_text(messages, tools, add_generation_prompt=True))

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Render a conversation up to the end of its last message, int64 [P], for demonstrations."""
        return self._tokens(self.render_text(messages, tools, add_generation_prompt=False))

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text, int64 [P], without the template."""
        return self._tokens(repair_unicode(text))

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of a reply, int64 [T], without the token that ends it."""
        # Special tokens stay: some tokenizers hold the markers of tool calls as such, which `parse_reply` reads.
        kept = [token for token in tokens.tolist() if token not in self._stop_tokens]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return repair_unicode(text)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation as text with the template.

        Raises: ConversationRejected, a ValueError, if the template rejects it; ValueError for a
        message whose content is no text.
        """
        for number, message in enumerate(messages):
            if not isinstance(message.content, str):
                raise ValueError(
                    f"message {number} of {len(messages)} ({message.role}) has the content "
                    f"{excerpt(message.content)}, expected a text"
                )
        try:
            return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        # A template that takes one tool call for each message (Llama 3's) ends the episode, not the run.
        except Exception as error:  # a template is a program, and not ours
            raise ConversationRejected(
                f"the chat template rejects a conversation of {_roles(messages)}: {_words(error)}",
                # The same conversation with plain replies tells whose fault it is: the policy's,
                # or the environment's.
                is_reply_at_fault=self._accepts(with_plain_replies(messages), tools),
            ) from error

    def _accepts(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        try:
            self._rendered(messages, tools, add_generation_prompt=True)
        except Exception:
            return False
        return True

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, add_generation_prompt: bool
    ) -> str:
        if messages and messages[0].role == "system" and not self._shows_system:
            messages = _put_before_next(messages)
        # A template leaves them out in silence: the model would not know of the tools, nor what it had called.
        if any(message.tool_calls for message in messages) and not self._shows_calls:
            messages = [_write_out_calls(message) for message in messages]
        if tools and not self._shows_tools:
            messages = _describe_tools(messages, tools)
        text: str = self._tokenizer.apply_chat_template(
            [self._given(message) for message in messages],
            chat_template=self._choose_template(tools),
            tools=[_tool_for_template(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return repair_unicode(text)

    @functools.cached_property
    def _shows_system(self) -> bool:
        """Whether the template writes a system message into a prompt."""
        asked = Message(role="user", content="?")
        try:
            texts = {
                self._tokenizer.apply_chat_template(
                    [self._given(each) for each in (Message(role="system", content=words), asked)],
                    chat_template=self._choose_template([]),
                    tokenize=False,
                )
                for words in ("one", "two")
            }
        except Exception:  # a template is a program, and not ours; rendering reports what it raises
            return True
        if len(texts) == 1:
            _log.warning(
                "the chat template leaves out system messages; the next one begins with them"
            )
        return len(texts) > 1

    @functools.cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes the tools into a prompt."""
        asked = {"role": "user", "content": "?"}
        return self._shows("tools", [asked], [asked], tools=[_tool_for_template(_ANY_TOOL)])

    @functools.cached_property
    def _shows_calls(self) -> bool:
        """Whether the template writes the calls of earlier replies into a prompt."""
        asked = {"role": "user", "content": "?"}
        function = {"name": _ANY_TOOL.name, "arguments": {"a": 1}}
        call = {"id": "0", "type": "function", "function": function}
        reply = {"role": "assistant", "content": "."}
        return self._shows("calls", [asked, {**reply, "tool_calls": [call]}], [asked, reply])

    def _shows(
        self, what: str, given: list[Any], without: list[Any], tools: list[Any] | None = None
    ) -> bool:
        """Whether the template makes different texts of a conversation with and without something."""
        render = functools.partial(
            self._tokenizer.apply_chat_template,
            chat_template=self._choose_template([_ANY_TOOL]),
            tokenize=False,
        )
        try:
            is_shown = bool(render(given, tools=tools) != render(without))
        except Exception:  # a template is a program, and not ours; rendering reports what it raises
            return True
        if not is_shown:
            _log.warning(
                "the chat template leaves out %s; they are written as text, in the form %s...%s",
                what,
                OPEN_CALL,
                CLOSE_CALL,
            )
        return is_shown

    def _choose_template(self, tools: Sequence[ToolSpec]) -> str | None:
        """Return the template of a conversation; None for the tokenizer's own choice.

        Of several by name, `tool_use` is for conversations with tools, as in transformers.
        """
        if not isinstance(self._template, Mapping):
            return self._template
        names = ["tool_use"] * bool(tools) + ["default"]
        found = next((self._template[name] for name in names if name in self._template), None)
        if found is None:
            raise ValueError(
                f"the chat templates are {sorted(self._template)}, expected one named 'default'; "
                "put chat_template.jinja beside the checkpoint's files"
            )
        return found

    def _given(self, message: Message) -> dict[str, Any]:
        """Return a message as the template expects it."""
        return _for_template(message)

    def _tokens(self, text: str) -> np.ndarray:
        return np.array(
            # The template writes the special tokens; a second beginning of text would be a prompt
            # that the model never saw.
            self._tokenizer.encode(text, add_special_tokens=False, verbose=False),
            np.int64,
        )


def parse_reply(text: str) -> Message:
    """Parse an assistant's text into a message, with its tool calls taken out of the text."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    kept: list[str] = []
    end = 0
    # The spans are found in one pass: searching anew after each opening took five seconds for a
    # reply of 8,000 openings that nothing closed.
    for start, stop in find_spans(text, OPEN_CALL, CLOSE_CALL):
        call = _parsed_call(text[start:stop], len(calls))
        after = stop + len(CLOSE_CALL)
        if isinstance(call, str):
            errors.append(call)
            kept.append(text[end:after])
        else:
            calls.append(call)
            kept.append(text[end : start - len(OPEN_CALL)])
        end = after
    kept.append(text[end:])
    content = "".join(kept).strip()
    if OPEN_CALL in text[end:]:
        errors.append("a tool call was begun with <tool_call> and not ended with </tool_call>")
    return Message(
        role="assistant", content=content, tool_calls=tuple(calls), call_errors=tuple(errors)
    )


def _parsed_call(text: str, number: int) -> ToolCall | str:
    """Return a tool call, or an error text."""
    try:
        call = msgspec.json.decode(text.strip(), type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:  # not a JSON object, not UTF-8, or nested deeply
        return f"a tool call is not a JSON object: {error}; {_EXPECTED}"
    try:
        name = msgspec.json.decode(call["name"], type=str)
    except (KeyError, msgspec.DecodeError):
        return f'a tool call has no "name", {_EXPECTED}'
    # The arguments stay text: encoding them again would change spaces, and so the tokens of the
    # next prompt.
    arguments = bytes(call.get("arguments", msgspec.Raw(b"{}"))).decode()
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, or nested deeply
        return f'the "arguments" of a tool call cannot be read: {error}; {_EXPECTED}'
    if not isinstance(given, dict):
        return f'the "arguments" of a tool call are {excerpt(arguments)}, no object; {_EXPECTED}'
    if _is_nested_deeply(given):
        return (
            f'the "arguments" of a tool call are nested more than {MAX_NESTING} deep; {_EXPECTED}'
        )
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments)


def _is_nested_deeply(value: Any) -> bool:
    """Return whether a value has more than `MAX_NESTING` objects and lists inside each other."""
    # Level by level and not by recursion, which would fail at the depth that is looked for.
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def with_plain_replies(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the conversation with one word for each reply of the policy, and no tool calls.

    The answers of tools to one reply become one answer of a user.
    """
    plain: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            plain.append(Message(role="assistant", content="ok"))
        elif message.role != "tool":
            plain.append(message)
        elif plain and plain[-1].role == "assistant":
            plain.append(Message(role="user", content="ok", images=message.images))
    return tuple(plain)


def _roles(messages: Sequence[Message]) -> str:
    """Describe a conversation, whose last messages are the likeliest to be at fault."""
    roles = [message.role for message in messages[-MOST_ROLES:]]
    num_others = len(messages) - len(roles)
    return f"roles {roles}" if not num_others else f"{num_others} messages, then roles {roles}"


def _words(error: Exception) -> str:
    """Return an error's own words, cut short: it may repeat the conversation."""
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"{name}{str(error)[:MOST_WORDS]}"


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: arguments are an object if they can be parsed so."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object_or_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        given["name"] = message.name
    return given


def _put_before_next(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose second message begins with the words of the first; alone, that is a user's."""
    first, rest = messages[0], list(messages[1:]) or [Message(role="user", content="")]
    content = "\n\n".join(filter(None, (first.content, rest[0].content)))
    return [msgspec.structs.replace(rest[0], content=content), *rest[1:]]


def _describe_tools(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return a conversation whose first message describes the tools."""
    listed = "\n".join(json.dumps(_tool_for_template(tool)["function"]) for tool in tools)
    described = TOOLS_TEXT.format(tools=listed)
    # Whoever says it: templates without tools often refuse a system message too.
    content = "\n\n".join([*(message.content for message in messages[:1]), described])
    return [
        *(msgspec.structs.replace(message, content=content) for message in messages[:1]),
        *messages[1:],
    ]


def _write_out_calls(message: Message) -> Message:
    """Return a message with its calls as text, in the form that `parse_reply` reads."""
    texts = [message.content] * bool(message.content) + list(map(_write_call, message.tool_calls))
    return msgspec.structs.replace(message, content="\n".join(texts), tool_calls=())


def _write_call(call: ToolCall) -> str:
    arguments = _object_or_text(call.arguments)
    return f"{OPEN_CALL}{json.dumps({'name': call.name, 'arguments': arguments})}{CLOSE_CALL}"


def _object_or_text(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _tool_for_template(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
