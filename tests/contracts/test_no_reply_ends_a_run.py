"""Whatever a policy, a tool or a page writes, the episode continues or ends with a reason.

A tiny tokenizer and the chat templates of many models, replies drawn at random from what has ended
runs, and a task whose tools and pages answer with the same.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from vla_rl.engines import EngineConfig
from vla_rl.engines.chat_interface import ChatEngineBase, Question, Sampled
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.envs.text import Ask, Done, TextEnvPool, TextLimits, TextTask
from vla_rl.models.language import CausalLanguageModel, ChatFormat, TinyConfig, tiny
from vla_rl.rollout import DecisionCounter, chat_agent
from vla_rl.rollout.episode_runner import run_episode
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, StopReason, Trajectory

_BODY: Final = """
{%- for message in messages %}
  {{- "[" ~ message.role ~ "]" ~ (message.content or "") }}
  {%- for call in message.tool_calls or [] %}
    {{- "<tool_call>" ~ call.function.name ~ (call.function.arguments|tojson) ~ "</tool_call>" }}
  {%- endfor %}
{%- endfor %}"""

ONE_CALL: Final = (
    """
{%- for message in messages %}
  {%- if message.tool_calls is defined and message.tool_calls|length != 1 %}
    {{- raise_exception("one tool call a message") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""One tool call a message, as Llama 3's."""

ITEMS: Final = """
{%- for message in messages %}
  {{- "[" ~ message.role ~ "]" ~ (message.content or "") }}
  {%- for call in message.tool_calls or [] %}
    {%- for name, value in call.function.arguments|items %}
      {{- name ~ "=" ~ (value if value is string else value|tojson) ~ ";" }}
    {%- endfor %}
  {%- endfor %}
{%- endfor %}"""
"""Writes arguments one by one, as the templates of Qwen3-Coder and GLM do."""

NO_TOOLS: Final = (
    """
{%- for message in messages %}
  {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
    {{- raise_exception("roles must alternate user/assistant") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""No system messages and no tools, as Gemma's."""

KNOWN_CALLS: Final = (
    """
{%- set known = namespace(ids=[]) %}
{%- for message in messages %}
  {%- for call in message.tool_calls or [] %}{%- set known.ids = known.ids + [call.id] %}{%- endfor %}
  {%- if message.role == "tool" and message.tool_call_id not in known.ids %}
    {{- raise_exception("a tool answers a call that nobody made") }}
  {%- endif %}
{%- endfor %}"""
    + _BODY
)
"""Each tool message answers a call, as in Mistral's."""

THOUGHTS: Final = """
{%- for message in messages %}
  {%- if message.role == "assistant" and "</think>" in message.content %}
    {{- message.content.split("</think>")[1].lstrip() }}
  {%- else %}
    {{- "[" ~ message.role ~ "]" ~ message.content }}
  {%- endif %}
  {%- for call in message.tool_calls or [] %}{{- call.function.arguments.a + 1 }}{%- endfor %}
{%- endfor %}"""
"""Drops thoughts, as Qwen3's, and fails for arguments of any other kind than it expects."""

TEMPLATES: Final = {
    "own": None,
    "one call": ONE_CALL,
    "items": ITEMS,
    "no tools": NO_TOOLS,
    "known calls": KNOWN_CALLS,
    "thoughts": THOUGHTS,
}
"""All of them by name; None is the tokenizer's own."""


CONTEXT = 8192
SHAPE = TinyConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=16,
    vocab_size=300,
    context_size=CONTEXT,
)

VALUES = (
    *("{}", "[]", "null", '""', '"a"', "0", "-0.0", "1e999", "9" * 5000, "NaN", "true", "{"),
    *('{"e": "1+2"}', '{"e": 3}', '{"e": null}', '{"e": ["1"]}', '{"e": "\\ud835"}', '{"": {}}'),
    *(
        '{"e": "1+2", "e": "3"}',
        '{"e": "</tool_call>"}',
        '{"e": "\\u0000"}',
        '"{\\"e\\": \\"1\\"}"',
    ),
    *(
        "[" * 50 + "]" * 50,
        "[" * 3000,
        '{"e":' * 99 + "1" + "}" * 99,
        '{"e":' * 1200 + "1" + "}" * 1200,
    ),
)
NAMES = (
    '"page"',
    '"shout"',
    '"none"',
    '""',
    "null",
    "3",
    '"\\ud835"',
    '"pa' + "g" * 400 + '"',
    "[]",
)
TEXTS = (
    *("", " ", "\n", "42", "\x00", "\ufffd", "\ud835", "caf\udce9", "\U0001d400", "a" * 300),
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_call",
        "<|im_end|>",
        "<|im_start|>system\n",
        "</think>",
    ),
    *(
        "<answer>",
        "</answer>",
        "\\boxed{",
        "####",
        "Answer:",
        "```",
        "```python\n",
        "{{ 1/0 }}",
        "{%",
    ),
    *("[", "]", "{", '"', "\\", "\u202e", "\u2028"),
)
"""Pieces of replies, tools' answers and pages: half surrogates as well, which a policy's own tokens
cannot make, but a tool and a page can."""


def draw_text(rng: random.Random) -> str:
    pieces = [rng.choice(TEXTS) * rng.choice((1, 1, 1, 3, 40)) for _ in range(rng.randint(0, 4))]
    return "".join(pieces)


def draw_reply(rng: random.Random) -> str:
    def call() -> str:
        fields = [f'"name": {rng.choice(NAMES)}', f'"arguments": {rng.choice(VALUES)}']
        rng.shuffle(fields)
        body = "{" + ", ".join(fields[: rng.choice((1, 2, 2, 2, 2))]) + "}"
        return f"<tool_call>{rng.choice(('', '', ' ', '['))}{body}</tool_call>"

    parts = [rng.choice((call, call, lambda: draw_text(rng)))() for _ in range(rng.randint(1, 3))]
    reply = "".join(parts)
    return reply[: rng.randint(0, len(reply))] if rng.random() < 0.2 else reply


class OddTask(TextTask):
    """Says odd things, and so do its tools."""

    limits = TextLimits(max_turns=5, max_answer_characters=2000)

    async def setup(self, seed: int, options: dict[str, Any]) -> Ask:
        self._rng = random.Random(seed)
        return Ask(f"begin {draw_text(self._rng)[:1000]}")

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        return (self.page, self.shout) if self._rng.random() < 0.8 else ()

    async def page(self, e: Any = None) -> Any:
        """Read a page."""
        kinds = (str, lambda text: [text], lambda text: {text: b"\xff"}, lambda text: {(text,): 1})
        return self._rng.choice(kinds)(draw_text(self._rng))

    async def shout(self, e: str) -> str:
        """Raise."""
        kinds = (ValueError, SystemExit, RecursionError, UnicodeError, BaseException)
        raise self._rng.choice(kinds)(draw_text(self._rng), e)

    async def reply(self, text: str) -> Ask | Done:
        if self._rng.random() < 0.4:
            return Done(float("42" in text), "42" in text, info={"said": text})
        return Ask(f"so {text}? {draw_text(self._rng)}")


class OddChat:
    """A policy's text side, with another chat template.

    Args:
        policy: its tokenizer, grammar and parser.
        template: the chat template; None for the tokenizer's own.
    """

    def __init__(self, policy: CausalLanguageModel, template: str | None) -> None:
        self._policy = policy
        self._format = ChatFormat(policy._tokenizer, policy.stop_tokens, template)
        self.render, self.tokenize, self.decode = (
            self._format.render,
            self._format.tokenize,
            self._format.decode,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class OddWriter(ChatEngineBase):
    """An engine whose policy writes odd replies; all but the sampling is a real engine's."""

    weight_version = 0

    def __init__(self, chat: OddChat, lane: DeviceLane) -> None:
        super().__init__(chat, lane, EngineConfig(), CONTEXT)

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        rng = random.Random(sampling.seed)
        said = self._chat.tokenize(draw_reply(rng))[: max_tokens - 1]
        stop = np.array([min(self._chat.stop_tokens)])
        tokens = said if len(said) and rng.random() < 0.1 else np.concatenate([said, stop])
        return Sampled(
            tokens=tokens,
            log_probs=np.full(len(tokens), -0.5, np.float32),
            versions=np.zeros(len(tokens), np.int64),
            finish_reason="stop" if tokens[-1] == stop[0] else "length",
        )


async def run_case(
    policy: CausalLanguageModel,
    pool: TextEnvPool,
    lane: DeviceLane,
    spec: EnvSpec,
    number: int,
    counter: DecisionCounter,
) -> Trajectory:
    """Run the episode of a case, under the template that its number names."""
    template = list(TEMPLATES.values())[number % len(TEMPLATES)]
    episode = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=0,
        env=spec,
        task=spec.id,
        seed=number,
        policy_seed=number,
    )
    engine: Any = OddWriter(OddChat(policy, template), lane)
    return await run_episode(pool, engine, chat_agent, episode, counter=counter)


@pytest.fixture(scope="module")
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["what is 1 + 2?"], seed=0)


@pytest.mark.parametrize(
    "num_cases", [300, pytest.param(10_000, marks=[pytest.mark.proof, pytest.mark.timeout(1800)])]
)
async def test_no_reply_of_a_policy_ends_a_run(
    policy: CausalLanguageModel, num_cases: int, tmp_path: Path
) -> None:
    reasons: Counter[StopReason] = Counter()
    faults: Counter[str] = Counter()
    counter = DecisionCounter()
    data = tmp_path / "rows.jsonl"
    data.write_text(
        json.dumps({"prompt": "6x7?", "answer": "42", "text": "Six times seven."}) + "\n"
    )
    odd = EnvSpec(id=f"{__name__}:OddTask")
    specs = (
        *(odd, odd, odd, EnvSpec(id="text/arithmetic"), EnvSpec(id="text/arithmetic_pair")),
        EnvSpec(id="text/search", kwargs={"data": str(data), "documents": str(data)}),
        *(
            EnvSpec(id="text/question", kwargs={"data": str(data), "scorer": scorer})
            for scorer in ("exact", "match", "math")
        ),
    )
    async with TextEnvPool() as pool, DeviceLane() as lane:
        for number in range(num_cases):
            trajectory = await run_case(
                policy, pool, lane, specs[number // len(TEMPLATES) % len(specs)], number, counter
            )
            reasons[trajectory.stop_reason] += 1
            faults.update(trajectory.info.get("tool_faults", {}))
            # what is recorded can be written and sent
            msgspec.json.encode(trajectory.info)
            assert all(len(step.chunk.tokens) >= 1 for step in trajectory.steps)
    # the cases are of every kind
    assert reasons.total() == num_cases
    assert {
        StopReason.SUCCESS,
        StopReason.TERMINATED,
        StopReason.TIME_LIMIT,
        StopReason.TOKEN_LIMIT,
        StopReason.REPLY_REJECTED,
    } <= reasons.keys()
    assert {"unreadable", "unknown_tool", "bad_arguments", "raised"} <= faults.keys()
