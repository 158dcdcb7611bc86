"""A small real language policy that adds: it calls tools, answers in JSON, and follows the ReAct
format, as it is asked to.

Its tokens are bytes. It stops at stop texts in the middle of what it would say, as an engine does.
"""

import json
import re
from collections.abc import Sequence

import numpy as np

from vla_rl.types import (
    ANY_REPLY,
    Completion,
    Message,
    Prompt,
    ReplyOptions,
    Sampling,
    TokenReport,
    ToolCall,
    ToolSpec,
)

QUESTION = re.compile(r"(\d+) plus (\d+)")
REACT = (
    "Thought: I have to add.\nAction: add\nAction Input: {a}, {b}\nObservation: 99\nThought: I "
    "know.\nFinal Answer: 99"
)


class Calculator:
    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        message = self._reply(prompt, tools, options)
        read = as_tokens(text_of(prompt))
        said, stopped_by = message.content, None
        for stop in options.stop:
            if stop in said:
                said, stopped_by = said[: said.index(stop)], stop
        calls = "".join(f"<{call.name}>{call.arguments}" for call in message.tool_calls)
        tokens = as_tokens(said + calls + (stopped_by or "\n"))[:max_tokens]
        is_cut = len(tokens) == max_tokens
        content = bytes(tokens.tolist()).decode() if is_cut and not calls else said
        return Completion(
            message=Message(role="assistant", content=content, tool_calls=message.tool_calls),
            prompt_tokens=read,
            tokens=tokens,
            log_probs=np.full(len(tokens), -0.5, np.float32),
            weight_versions=np.zeros(len(tokens), np.int64),
            finish_reason="length" if is_cut else "stop",
            temperature=1.0,
            stopped_by=None if is_cut else stopped_by,
            report=None
            if options.top_log_probs is None
            else reports(tokens, options.top_log_probs),
        )

    def _reply(self, prompt: Prompt, tools: Sequence[ToolSpec], options: ReplyOptions) -> Message:
        if isinstance(prompt, str | np.ndarray):
            return Message(role="assistant", content=" and so on")
        text, last = text_of(prompt), prompt[-1]
        asked = QUESTION.search(text)
        a, b = asked.groups() if asked else ("1", "1")
        is_answered = last.role == "tool"
        answer = last.content if is_answered else str(int(a) + int(b))
        names = [tool.name for tool in tools]
        forced = options.tools.names[0] if options.tools.names else None
        if forced in names and options.tools.mode == "required":
            return call_of(forced, tools, answer, a, b)
        if "add" in names and asked and not is_answered:
            return call_of("add", tools, answer, a, b)
        if options.format is not None:
            return Message(
                role="assistant", content=json.dumps({"sum": int(re.findall(r"-?\d+", answer)[-1])})
            )
        if "Action Input:" in text:
            seen = re.findall(r"Observation: (\d+)", text)
            said = f"I know.\nFinal Answer: {seen[-1]}" if seen else REACT.format(a=a, b=b)
            return Message(role="assistant", content=said)
        if is_answered or asked:
            return Message(role="assistant", content=f"It is {answer}.")
        return Message(role="assistant", content="hello there")


def call_of(name: str, tools: Sequence[ToolSpec], answer: str, a: str, b: str) -> Message:
    """A call that fits the tool's schema as far as this policy knows: two numbers, or their sum."""
    (tool,) = [tool for tool in tools if tool.name == name]
    known = {"a": int(a), "b": int(b), "sum": int(a) + int(b)}
    arguments = {field: known.get(field, 0) for field in tool.parameters.get("properties", {})}
    return Message(
        role="assistant", tool_calls=(ToolCall(id="0", name=name, arguments=json.dumps(arguments)),)
    )


def text_of(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, np.ndarray):
        return bytes(prompt.tolist()).decode()
    parts = [
        f"<{message.role}>{message.content}{''.join(call.name + call.arguments for call in message.tool_calls)}"
        for message in prompt
    ]
    return "\n".join(parts) + "\n<assistant>"


def as_tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def reports(tokens: np.ndarray, num_alternatives: int) -> tuple[TokenReport, ...]:
    others = tuple((b"?", -1.0 - number) for number in range(num_alternatives))
    return tuple(TokenReport(text=bytes([token]), alternatives=others) for token in tokens.tolist())
