"""Tokens are sampled by their probabilities and seeds, under grammars too, and learned from with the same ones."""

import asyncio
from collections.abc import Sequence
from math import log

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine, sampling
from vla_rl.engines.sampling import (
    Guide,
    Vocabulary,
    choose_tokens,
    first_stop,
    likeliest_tokens,
    pair_likeliest,
    seeded_uniforms,
)
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.learner import PolicyMismatchError
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.rollout import chat_agent
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import (
    ANY_REPLY,
    ChoiceFormat,
    EnvSpec,
    EpisodeSpec,
    Message,
    RegexFormat,
    ReplyOptions,
    Sampling,
    TextOutcome,
    TextStart,
    Trajectory,
)


def test_frequencies_are_the_tempered_probabilities() -> None:
    # p is proportional to (1, 4, 16) ** (1 / 2) = (1, 2, 4) at temperature 2: 1/7, 2/7, 4/7
    logits = torch.log(torch.tensor([1.0, 4.0, 16.0])).expand(1, 20_000, 3)
    tokens, log_probs = choose_tokens(logits, [Sampling(temperature=2.0, seed=11)])
    frequencies = torch.bincount(tokens[0], minlength=3) / 20_000
    np.testing.assert_allclose(frequencies, [1 / 7, 2 / 7, 4 / 7], atol=0.015)  # more than 4 sigma
    np.testing.assert_allclose(log_probs[0].exp(), (2.0 ** tokens[0].double()) / 7, atol=1e-6)


def test_an_impossible_token_is_never_chosen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(4, 500, 5)
    tokens, _ = choose_tokens(logits, [Sampling(seed=seed) for seed in range(4)])
    assert set(tokens.unique().tolist()) == {1, 3}


def test_rows_have_streams_of_their_own() -> None:
    seeds = [Sampling(seed=3), Sampling(seed=2**62), Sampling(seed=3)]
    noise = seeded_uniforms(seeds, 8)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(seeded_uniforms(seeds[:1], 4)[0], noise[0, :4])


@pytest.mark.parametrize("at_once", [1, 1000, 2100])
def test_rows_sampled_in_parts_are_those_sampled_whole(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 3.0 * torch.randn(7, 2, 500, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(seed=row, temperature=0.5 + row, greedy=row == 3) for row in range(7)]
    whole = choose_tokens(logits, samplings)
    monkeypatch.setattr(sampling, "CHOSEN_AT_ONCE", at_once)
    parts = choose_tokens(logits, samplings)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 200, 4)
    logits[..., 2] = 0.1
    tokens, log_probs = choose_tokens(logits, [Sampling(greedy=True), Sampling(seed=1)])
    assert set(tokens[0].tolist()) == {2}
    assert set(tokens[1].tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(log_probs[0], 0.1 - np.log(3 + np.exp(0.1)), atol=1e-6)


def test_a_greedy_row_by_the_mean_takes_the_token_between_two_heaps() -> None:
    logits = torch.tensor([0.4, 1e-9, 1e-9, 0.3, 0.3]).log().expand(3, 2, 5)
    rows = [
        Sampling(greedy=True),
        Sampling(greedy=True, by_mean=True),
        Sampling(greedy=True, by_mean=True, temperature=0.1),
    ]
    tokens, log_probs = choose_tokens(logits, rows)
    # the colder the distribution, the nearer its mean is to the likeliest token
    assert tokens.tolist() == [[0, 0], [2, 2], [0, 0]]
    np.testing.assert_allclose(log_probs[1], np.log(1e-9), rtol=1e-5)


def test_noise_that_rounds_up_to_the_whole_means_the_last_possible_token() -> None:
    logits = torch.tensor([[[0.0, 0.3, -torch.inf]]])
    tokens, log_probs = choose_tokens(logits, [Sampling()], torch.ones(1, 1, dtype=torch.float64))
    assert tokens.tolist() == [[1]]
    assert torch.isfinite(log_probs).all()


def test_the_likeliest_tokens_are_possible_ones_in_order() -> None:
    logits = torch.log(torch.tensor([[[1.0, 4.0, 0.0, 16.0]]]))
    (row,) = pair_likeliest(*likeliest_tokens(logits, [Sampling(temperature=2.0)], 4))
    assert [token for token, _ in row] == [3, 1, 0]
    np.testing.assert_allclose(
        np.exp([log_prob for _, log_prob in row]), [4 / 7, 2 / 7, 1 / 7], atol=1e-6
    )


SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)
ASKED = (Message(role="user", content="a or b?"),)
A_OR_B = ReplyOptions(format=ChoiceFormat(choices=("aa", "ab", "b")))


@pytest.fixture
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["a"], seed=0)


def episode(number: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="x"),
        task="x",
        seed=0,
        policy_seed=number,
    )


class Asking:
    """Asks as often as it has rules for the replies; pays for replies that begin with b."""

    def __init__(self, number: int, rules: Sequence[ReplyOptions]) -> None:
        self.episode, self._rules = episode(number), list(rules)

    async def reset(self) -> TextStart:
        return TextStart(messages=ASKED, options=self._rules.pop(0))

    async def step(self, message: Message) -> TextOutcome:
        rules = self._rules.pop(0) if self._rules else None
        return TextOutcome(
            messages=ASKED,
            reward=float(message.content.startswith("b")),
            terminated=rules is None,
            truncated=False,
            info={},
            options=rules or ANY_REPLY,
        )


async def run_episode(
    engine: TorchChatEngine, number: int, rules: Sequence[ReplyOptions]
) -> Trajectory:
    return await chat_agent(Asking(number, rules), EpisodePolicy(engine, episode(number)))


async def test_log_probs_are_those_of_the_tokens_that_were_allowed(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    network = policy.network
    with torch.no_grad():
        network.model.norm.weight.zero_()  # type: ignore[union-attr]  # every token is as likely as every other
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        replies = [
            await engine.generate(ASKED, sampling=Sampling(seed=seed), options=A_OR_B)
            for seed in range(12)
        ]
    found = {reply.message.content: reply.log_probs.tolist() for reply in replies}
    # a or b; then a or b after a, and nothing after b; then the end alone
    assert found == {
        "aa": pytest.approx([-log(2), -log(2), 0.0]),
        "ab": pytest.approx([-log(2), -log(2), 0.0]),
        "b": pytest.approx([-log(2), 0.0]),
    }


async def test_turns_with_and_without_a_grammar_share_a_row_and_the_learner_finds_the_samplers_log_probs(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    digits = ReplyOptions(format=RegexFormat(pattern="[0-9]{3}"))
    async with TorchChatEngine(policy, lane, EngineConfig(max_reply=6)) as engine:
        trajectories = await asyncio.gather(
            *(run_episode(engine, number, [A_OR_B, ANY_REPLY, digits]) for number in range(3))
        )
    assert [step.observation.get("grammar") is None for step in trajectories[0].steps] == [
        False,
        True,
        False,
    ]
    rows = flatten_trajectories(trajectories, [1.0, -1.0, 0.5])
    grammars = [part for seen in rows.observations for part in seen.get("grammars", ())]
    assert len(grammars) == 6
    learner = Learner(
        policy, lane, LearnerConfig(optimizer=OptimizerConfig(warmup_steps=0), max_mismatch=1e-4)
    )
    reference = await Reference(policy, lane, 8).log_probs(trajectories)
    for trajectory, log_probs in zip(trajectories, reference, strict=True):
        for step, found in zip(trajectory.steps, log_probs, strict=True):
            np.testing.assert_allclose(found, step.chunk.log_probs, atol=1e-4)
    report = await learner.update(trajectories, [1.0, -1.0, 0.5])
    assert report.metrics["update/log_prob_gap_max"] < 1e-4
    assert np.isfinite(report.metrics["update/entropy"])


async def test_a_trajectory_that_lost_its_grammar_is_not_learned_from(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        trajectories = await run_episode(engine, 0, [A_OR_B])
    (step,) = trajectories.steps
    lost = msgspec.structs.replace(
        step, observation={"prompt_tokens": step.observation["prompt_tokens"]}
    )
    learner = Learner(policy, lane, LearnerConfig(optimizer=OptimizerConfig(warmup_steps=0)))
    with pytest.raises(PolicyMismatchError, match="the learner's log-probs differ by"):
        await learner.update([msgspec.structs.replace(trajectories, steps=(lost,))], [1.0])
    other = policy.vocabulary.text(step.chunk.tokens[:-1].tolist()).decode() + "!"
    wrong = msgspec.structs.replace(
        step, observation={**step.observation, "grammar": f'start: "{other}"'}
    )
    with pytest.raises(ValueError, match="a reply left its grammar"):
        await learner.update([msgspec.structs.replace(trajectories, steps=(wrong,))], [1.0])


async def test_a_policy_learns_what_pays_among_the_allowed_replies(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=32)) as engine:
        learner = Learner(policy, lane, config, publish_to=[engine])
        shares = []
        for update in range(8):
            trajectories = await asyncio.gather(
                *(run_episode(engine, 32 * update + number, [A_OR_B]) for number in range(32))
            )
            rewards = np.array([trajectory.undiscounted_return for trajectory in trajectories])
            shares.append(rewards.mean())
            await learner.update(trajectories, list(rewards - 0.5))
    assert shares[0] < 0.8
    assert shares[-1] > 0.9


async def test_a_grammar_that_fails_on_the_way_costs_its_own_reply_alone(
    policy: CausalLanguageModel, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = Guide.allowed

    def too_complex(guide: Guide) -> torch.Tensor:
        raise ValueError("a reply left its grammar: ParserTooComplex")

    async with TorchChatEngine(policy, lane, EngineConfig(max_reply=40)) as engine:
        other = asyncio.create_task(engine.generate(ASKED, sampling=Sampling(seed=1)))
        monkeypatch.setattr(Guide, "allowed", too_complex)
        with pytest.raises(ValueError, match="ParserTooComplex"):
            await engine.generate(ASKED, sampling=Sampling(seed=1), options=A_OR_B)
        monkeypatch.setattr(Guide, "allowed", allowed)
        assert len((await other).tokens) >= 1
        reply = await engine.generate(ASKED, sampling=Sampling(seed=1), options=A_OR_B)
    assert reply.message.content in ("aa", "ab", "b")


async def test_a_reply_whose_grammar_fails_on_the_way_ends_with_its_tokens_which_are_learnt(
    policy: CausalLanguageModel, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ReplyOptions(format=RegexFormat(pattern="[ab]{20}"))
    take = Guide.advance

    def too_complex(guide: Guide, token: int) -> None:
        taken = vars(guide).setdefault("taken", [])
        taken.append(token)
        if len(taken) == 3:
            raise ValueError("a reply left its grammar: ParserTooComplex")
        take(guide, token)

    monkeypatch.setattr(Guide, "advance", too_complex)
    async with TorchChatEngine(policy, lane, EngineConfig(max_reply=40)) as engine:
        trajectories = await run_episode(engine, 0, [options])
    (step,) = trajectories.steps
    assert len(step.chunk.tokens) == 3
    learner = Learner(policy, lane, LearnerConfig(optimizer=OptimizerConfig(warmup_steps=0)))
    await learner.update([trajectories], [1.0])  # finds the recorded log-probs


def test_a_grammar_stays_compiled_and_replies_do_not_share_their_place_in_it(
    policy: CausalLanguageModel,
) -> None:
    grammar = policy.grammar(A_OR_B, ())
    assert grammar is not None
    first, second = policy.vocabulary.guide(grammar), policy.vocabulary.guide(grammar)
    begin = first.allowed()
    first.advance(policy.tokenize("b")[0])
    assert not torch.equal(first.allowed(), begin)
    assert torch.equal(second.allowed(), begin)


def test_a_tokenizer_with_very_long_tokens_is_refused_by_name() -> None:
    phrase = "an unusually long phrase without any digit " * 40
    shape = msgspec.structs.replace(SHAPE, vocab_size=600)
    policy = tiny(shape, [phrase] * 3, seed=0)
    assert max(map(len, policy._tokenizer.get_vocab())) > 1024
    with pytest.raises(ValueError, match=r"longest token has \d+ bytes, expected at most 1024"):
        Vocabulary(policy._tokenizer, 600).guide("start: /a/")
    assert policy.grammar(ANY_REPLY, ()) is None  # replies without rules need no such thing


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        (b"one two", ("two", "one"), "one"),
        (b"one two", ("three",), None),
        ("schön".encode(), ("ö",), "ö"),
        (b"\xc3schn", ("\u00f6",), None),
    ],
)
def test_of_several_stop_texts_the_one_that_begins_first_counts(
    text: bytes, stop: tuple[str, ...], found: str | None
) -> None:
    assert first_stop(text, stop) == found
