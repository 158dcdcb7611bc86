"""An endpoint for clients in interpreters of their own: a key for a small real policy that adds, one for a model of
random weights.

Its first line of output says where it is. It serves until its input ends; then a learner takes an
update from everything that the model said, and the last line tells how far its log-probs were from
the recorded ones. The policy that adds calls tools, answers in JSON, and follows the ReAct format,
as it is asked to. Its tokens are bytes. It stops at stop texts in the middle of what it would say,
as an engine does.
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence

import numpy as np
import uvloop

from vla_rl.endpoint import Endpoint, Session
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Message,
    Prompt,
    ReplyOptions,
    Sampling,
    StopReason,
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


SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=4096,
)
EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="clients", seed=0, policy_seed=0
)
MAX_GAP = 1e-3


async def learned_gap(model: CausalLanguageModel, lane: DeviceLane, session: Session) -> float:
    """Largest difference between the recorded log-probs and the learner's; 0 if the model was not
    asked.
    """
    if not session.calls:
        return 0.0
    trajectory = session.trajectory(EPISODE, 1.0, StopReason.TERMINATED)
    config = LearnerConfig(
        optimizer=OptimizerConfig(warmup_steps=0), max_mismatch=MAX_GAP, micro_batch=1
    )
    report = await Learner(model, lane, config).update([trajectory], [1.0])
    return report.metrics["update/log_prob_gap_max"]


async def main() -> None:
    model = tiny(SHAPE, ["a"], seed=0)
    config = EngineConfig(max_reply=512)
    async with (
        DeviceLane(num_threads=1) as lane,
        TorchChatEngine(model, lane, config) as engine,
        Endpoint() as endpoint,
    ):
        with (
            endpoint.session(Calculator()) as calculator,
            endpoint.session(EpisodePolicy(engine, EPISODE)) as real,
        ):
            keys = {"calculator": calculator.api_key, "real": real.api_key}
            print(json.dumps({"base_url": endpoint.base_url, **keys}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            gap = await learned_gap(model, lane, real)
            num_guided = sum(call.completion.grammar is not None for call in real.calls)
            print(
                json.dumps(
                    {
                        "num_calls": len(calculator.calls) + len(real.calls),
                        "num_guided": num_guided,
                        "largest_gap": gap,
                    }
                ),
                flush=True,
            )
    sys.exit(0 if gap < MAX_GAP else 1)


if __name__ == "__main__":
    uvloop.run(main())
