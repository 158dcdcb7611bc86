"""Replies under rules, and new weights: the same tests on the torch engine and on vLLM.

The rules of every engine that generates replies are tested by `ChatEngineContract`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from small_policies import completing_policy, moved

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.engines.vllm import VllmChatEngine
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.rollout import EpisodePolicy
from vla_rl.types import (
    ANY_REPLY,
    ChoiceFormat,
    Completion,
    EnvSpec,
    EpisodeSpec,
    GrammarFormat,
    JsonFormat,
    Message,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    Sampling,
    ToolRule,
    ToolSpec,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs_vllm,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

TOLERANCE = 1e-5
MAX_REPLY = 24
ASKED = (Message(role="user", content="what is 3 plus 4"),)


class Completing:
    """An open engine, and the policy whose weights it has now."""

    def __init__(self, engine: Any, lane: DeviceLane, policy: CausalLanguageModel) -> None:
        self.engine, self.lane, self.first, self.policy = engine, lane, policy, policy

    async def publish(self, policy: CausalLanguageModel, version: int) -> None:
        await self.lane.run(self.engine.apply_weights, policy.network, version)
        self.policy = policy

    async def say(self, messages: tuple[Message, ...] = ASKED, **sampling: Any) -> Completion:
        completion: Completion = await self.engine.generate(messages, sampling=Sampling(**sampling))
        return completion

    def gap(self, completion: Completion, temperature: float = 1.0) -> float:
        return gap(self.policy, completion, temperature)


def gap(
    policy: CausalLanguageModel, completion: Completion, temperature: float, begin: int = 0
) -> float:
    """Largest difference from the learner's log-probs, from token `begin` of the reply on."""
    grammars = (
        () if completion.grammar is None else ((0, len(completion.tokens), completion.grammar),)
    )
    batch = policy.prepare([{"prompt_tokens": completion.prompt_tokens, "grammars": grammars}])
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            batch, torch.from_numpy(completion.tokens)[None], torch.tensor([temperature])
        )
    return float((log_probs[0] - torch.from_numpy(completion.log_probs)).abs()[begin:].max())


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch", "vllm"])
async def completing(request: pytest.FixtureRequest) -> AsyncIterator[Completing]:
    policy = completing_policy()
    config = EngineConfig(max_reply=MAX_REPLY)
    async with DeviceLane(1) as lane:
        make: Any = (
            (lambda: TorchChatEngine(policy.copy(), lane, config))
            if request.param == "torch"
            else (lambda: VllmChatEngine(serve(policy), lane, config))
        )
        async with make() as engine:
            yield Completing(engine, lane, policy)


SUM = JsonFormat(
    schema={
        "type": "object",
        "properties": {
            "sum": {"type": "integer", "minimum": 0, "maximum": 9},
            "is_odd": {"type": "boolean"},
        },
        "required": ["sum", "is_odd"],
        "additionalProperties": False,
        # random weights would choose much white space
        "x-guidance": {"item_separator": ",", "key_separator": ":"},
    }
)
ADD = ToolSpec(
    name="add",
    description="adds",
    parameters={
        "type": "object",
        "properties": {"left": {"enum": [1, 2]}, "right": {"enum": [3, 4]}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    is_strict=True,
)


async def ask(completing: Completing, options: ReplyOptions, **asked: Any) -> Completion:
    sampling = Sampling(seed=asked.pop("seed", 1), temperature=asked.pop("temperature", 1.0))
    completion: Completion = await completing.engine.generate(
        ASKED, sampling=sampling, options=options, **asked
    )
    return completion


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_a_reply_under_a_schema_satisfies_it_with_the_log_probs_that_the_learner_finds(
    completing: Completing, temperature: float
) -> None:
    replies = await asyncio.gather(
        *(
            ask(completing, ReplyOptions(format=SUM), seed=seed, temperature=temperature)
            for seed in range(6)
        )
    )
    whole = [
        json.loads(reply.message.content) for reply in replies if reply.finish_reason == "stop"
    ]
    assert whole
    for said in whole:
        assert set(said) == {"sum", "is_odd"}
        assert said["sum"] in range(10)
    for reply in replies:
        assert reply.grammar is not None
        assert completing.gap(reply, temperature) < TOLERANCE
        # without its grammar the learner would find another distribution
        free = msgspec.structs.replace(reply, grammar=None)
        assert completing.gap(free, temperature) > 0.1


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (RegexFormat(pattern="[ab]{3}/[0-9]"), "[ab]{3}/[0-9]"),
        (ChoiceFormat(choices=("yes", "no", 'n\u00f6 "never"')), 'yes|no|n\u00f6 "never"'),
        (GrammarFormat(lark='start: "<" word ">"\nword: /[x-z]+/ | "1" word'), "<1*[x-z]+>"),
    ],
)
async def test_a_reply_has_the_form_that_was_asked_for(
    completing: Completing, form: ReplyFormat, pattern: str
) -> None:
    for seed in range(4):
        reply = await ask(completing, ReplyOptions(format=form), seed=seed)
        assert reply.finish_reason == "length" or re.fullmatch(pattern, reply.message.content)
        assert completing.gap(reply) < TOLERANCE


async def test_a_tool_that_has_to_be_called_is_called_once_with_arguments_of_its_schema(
    completing: Completing,
) -> None:
    rule = ToolRule(mode="required", names=("add",), max_calls=1)
    for seed in range(4):
        reply = await ask(
            completing, ReplyOptions(tools=rule), seed=seed, tools=(ADD,), max_tokens=MAX_REPLY
        )
        assert completing.gap(reply) < TOLERANCE
        if reply.finish_reason == "stop":
            (call,) = reply.message.tool_calls
            assert call.name == "add"
            assert json.loads(call.arguments) in [
                {"left": left, "right": right} for left in (1, 2) for right in (3, 4)
            ]


async def test_a_schema_that_no_grammar_can_express_is_refused_and_others_are_not_disturbed(
    completing: Completing,
) -> None:
    other = asyncio.create_task(completing.say(seed=1))
    with pytest.raises(ValueError, match=r"Unimplemented keys: \[\"not\"\]"):
        await ask(completing, ReplyOptions(format=JsonFormat(schema={"not": {}})))
    assert completing.gap(await other) < TOLERANCE


async def test_a_stop_text_ends_a_reply_and_its_tokens_are_kept(completing: Completing) -> None:
    free = await completing.say(seed=3)
    text = completing.policy.decode(free.tokens)
    stop = re.findall("[a-zA-Z]{2}", text)[1]  # random weights say little that is text
    cut = await ask(completing, ReplyOptions(stop=("never said", stop)), seed=3)
    assert (cut.finish_reason, cut.stopped_by) == ("stop", stop)
    assert cut.message.content == text[: text.index(stop)].strip()
    assert cut.tokens.tolist() == free.tokens[: len(cut.tokens)].tolist()  # sampling is not touched
    assert stop in completing.policy.decode(cut.tokens)
    assert stop not in completing.policy.decode(cut.tokens[:-1])
    assert completing.gap(cut) < TOLERANCE
    with pytest.raises(ValueError, match="a stop text is empty"):
        await ask(completing, ReplyOptions(stop=("",)))


async def test_the_likeliest_tokens_are_reported_beside_those_that_were_sampled(
    completing: Completing,
) -> None:
    reply = await ask(completing, ReplyOptions(top_log_probs=3), seed=3)
    assert reply.report is not None
    assert len(reply.report) == len(reply.tokens)
    said = b"".join(token.text for token in reply.report[:-1])
    assert completing.policy.decode(reply.tokens[:-1]) == said.decode(errors="replace")
    for token, log_prob in zip(reply.report, reply.log_probs.tolist(), strict=True):
        found = [number for _, number in token.alternatives]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)
        assert log_prob <= found[0] + TOLERANCE
    plain = await ask(completing, ReplyOptions(top_log_probs=0), seed=3)
    assert plain.report is not None
    assert [token.text for token in plain.report] == [token.text for token in reply.report]
    assert not any(token.alternatives for token in plain.report)
    assert (await completing.say(seed=3)).report is None


async def test_text_and_tokens_are_continued_as_they_are(completing: Completing) -> None:
    text = await completing.engine.generate("what is 3", sampling=Sampling(seed=1))
    tokens = await completing.engine.generate(
        completing.policy.tokenize("what is 3"), sampling=Sampling(seed=1)
    )
    assert (
        text.prompt_tokens.tolist()
        == tokens.prompt_tokens.tolist()
        == completing.policy.tokenize("what is 3").tolist()
    )
    assert text.tokens.tolist() == tokens.tokens.tolist()
    # neither parsed nor stripped
    assert text.message.content == completing.policy.decode(text.tokens)
    assert completing.gap(text) < TOLERANCE


async def test_a_cancelled_reply_is_given_up(completing: Completing) -> None:
    saying = asyncio.create_task(completing.say(seed=1))
    await asyncio.sleep(0)
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert completing.gap(await completing.say(seed=1)) < TOLERANCE


async def test_an_engine_that_speaks_does_not_act(completing: Completing) -> None:
    episode = EpisodeSpec(
        episode_id=0,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    with pytest.raises(TypeError, match="use `generate`"):
        await EpisodePolicy(completing.engine, episode).act({})


async def test_replies_that_run_go_on_with_new_weights_and_every_token_names_its_own(
    completing: Completing,
) -> None:
    """What a token was sampled from is the network of its version, over a conversation read by that
    network alone.
    """
    by_version = {5: moved(completing.first, 1), 6: moved(completing.first, 2)}
    replies: list[Completion] = []
    another, is_over = asyncio.Condition(), asyncio.Event()

    def have_enough(version: int) -> bool:
        return sum(version in reply.weight_versions for reply in replies) >= 8

    async def converse(number: int) -> None:
        while not is_over.is_set():
            options = (
                ReplyOptions(format=RegexFormat(pattern="[a-z ]{40}")) if number % 2 else ANY_REPLY
            )
            reply = await ask(completing, options, seed=len(replies) * 8 + number)
            async with another:
                replies.append(reply)
                another.notify()

    async with asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(converse(number))
        for version, policy in by_version.items():
            await completing.publish(policy, version)
            async with another:
                await another.wait_for(partial(have_enough, version))
        is_over.set()
    networks = {0: completing.first, **by_version}
    assert {int(version) for reply in replies for version in reply.weight_versions} >= {5, 6}
    for reply in replies:
        assert (np.diff(reply.weight_versions) >= 0).all()
        newest = int(reply.weight_versions[-1])
        begin = int(np.argmax(reply.weight_versions == newest))
        assert gap(networks[newest], reply, 1.0, begin) < TOLERANCE
