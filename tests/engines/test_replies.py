"""A reply grows token by token until something ends it, in conversations with images too."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, noise, tiny_vision

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.engines.reply import Reply
from vla_rl.envs.text import Ask, Done, TextEnvPool, TextTask
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.models.language import VisionLanguageModel
from vla_rl.rollout import chat_agent
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import (
    ChoiceFormat,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Info,
    Message,
    RegexFormat,
    ReplyOptions,
    Sampling,
    make_conversation_observation,
)

PROMPT = np.array([5, 6], np.int64)
STOP = frozenset({9})


def reply(max_tokens: int = 3, **sampling) -> Reply:
    return Reply(PROMPT, Sampling(**sampling), max_tokens)


def test_a_reply_ends_at_a_stop_token_which_is_a_part_of_it() -> None:
    found = reply()
    found.add_token(7, -0.5, 1, STOP)
    assert not found.is_over
    found.add_token(9, -0.25, 2, STOP)
    assert (found.is_over, found.finish_reason) == (True, "stop")
    assert found.tokens.tolist() == [7, 9]
    assert (found.log_probs, found.versions) == ([-0.5, -0.25], [1, 2])
    assert found.conversation == [5, 6, 7, 9]


def test_a_reply_ends_at_its_limit() -> None:
    found = reply(max_tokens=2)
    for _ in range(2):
        assert found.finish_reason is None
        found.add_token(7, -0.5, 0, STOP)
    assert found.finish_reason == "length"


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    found = reply(max_tokens=1)
    found.add_token(9, -0.5, 0, STOP)
    assert found.finish_reason == "stop"


def test_the_model_reads_what_it_does_not_hold() -> None:
    found = reply()
    assert found.unread_tokens == [5, 6]
    found.num_held = 2
    found.add_token(7, -0.5, 0, STOP)
    assert found.unread_tokens == [7]


def test_draws_depend_on_the_seed_and_the_place_alone() -> None:
    def draws(max_tokens: int, seed: int) -> list[float]:
        found, drawn = reply(max_tokens, seed=seed), []
        for token in range(3):
            drawn.append(found.next_uniform)
            found.add_token(token, -1.0, 0, STOP)
        return drawn

    assert draws(3, seed=1) == draws(50, seed=1)
    assert draws(3, seed=1) != draws(3, seed=2)
    assert len(set(draws(3, seed=1))) == 3


class TooComplex:
    """A position in a grammar that cannot go on after some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def advance(self, token: int) -> None:
        self.num_tokens -= 1
        if self.num_tokens < 1:
            raise ValueError("a reply left its grammar: ParserTooComplex")


def test_a_grammar_that_grows_too_complex_ends_its_reply_with_the_tokens_so_far() -> None:
    found = Reply(PROMPT, Sampling(), 3, guide=TooComplex(2))  # type: ignore[arg-type]
    found.add_token(7, -1.0, 0, STOP)
    assert not found.is_over
    found.add_token(8, -1.0, 0, STOP)
    assert (found.finish_reason, found.failure, found.tokens.tolist()) == ("length", None, [7, 8])


def test_a_grammar_that_allows_no_token_is_a_failure() -> None:
    found = reply()
    found.end_early(ValueError("its grammar is too complex"))
    assert (found.is_over, found.finish_reason, str(found.failure)) == (
        True,
        None,
        "its grammar is too complex",
    )


def test_a_failure_ends_a_reply_too() -> None:
    found = reply()
    found.failure = ValueError("its grammar grew too complex")
    assert found.is_over


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_no_draw_has_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*, expected > 0"):
        reply(temperature=temperature)


EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="x", seed=0, policy_seed=0
)


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> VisionLanguageModel:
    return tiny_vision(family=request.param)


def said(seed: int) -> tuple[Message, ...]:
    return (Message(role="user", images=(noise(seed, 84, 56),), content="what is it?"),)


def log_probs_of(policy: VisionLanguageModel, reply: Completion) -> np.ndarray:
    seen = make_conversation_observation(reply.prompt_tokens, reply.images, reply.image_starts)
    tokens = torch.from_numpy(reply.tokens)[None]
    found, _ = policy.log_probs(policy.prepare([seen]), tokens, torch.ones(1))
    log_probs: np.ndarray = found.detach().numpy()[0]
    return log_probs


async def test_log_probs_are_those_that_the_learner_finds_and_no_image_is_taken_for_another(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    # the last two show the first image again, and go on where it was kept
    shown = [0, 1, 2, 0, 0]
    config = EngineConfig(max_batch=2, max_reply=12, kept_conversations=4)
    async with TorchChatEngine(policy, lane, config) as engine:
        replies = await asyncio.gather(
            *(engine.generate(said(seed), sampling=Sampling(seed=7)) for seed in shown)
        )
        text = await engine.generate([Message(role="user", content="no image")], max_tokens=4)
    for reply in (*replies, text):
        np.testing.assert_allclose(reply.log_probs, log_probs_of(policy, reply), atol=1e-4)
    assert text.images == ()
    assert replies[3].tokens.tolist() == replies[4].tokens.tolist() == replies[0].tokens.tolist()
    first = [float(reply.log_probs[0]) for reply in replies[:3]]
    assert len(set(first)) == 3


async def test_the_image_of_a_group_is_computed_once_and_another_is_not_taken_for_it(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    shown = [0, 0, 1, 0]
    async with TorchChatEngine(policy, lane, EngineConfig(max_batch=4, max_reply=6)) as engine:
        replies = await asyncio.gather(
            *(engine.generate(said(image), sampling=Sampling(seed=7)) for image in shown)
        )
        share = engine.metrics()["engine/prompt_share_reused"]
    lengths = [len(reply.prompt_tokens) for reply in replies]
    assert share > (lengths[1] + lengths[3] - 2) / sum(lengths) - 1e-9
    for reply in replies:
        np.testing.assert_allclose(reply.log_probs, log_probs_of(policy, reply), atol=1e-4)
    assert replies[0].tokens.tolist() == replies[1].tokens.tolist() == replies[3].tokens.tolist()


async def test_new_weights_read_the_images_again(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        before = await engine.generate(said(0), sampling=Sampling(seed=7), max_tokens=4)
        with torch.no_grad():
            for block in policy.blocks[:3]:  # of the tower
                for parameter in block.parameters():
                    parameter.mul_(0.5)
        await lane.run(engine.apply_weights, policy.network, 1, work="update")
        after = await engine.generate(said(0), sampling=Sampling(seed=7), max_tokens=4)
    np.testing.assert_allclose(after.log_probs, log_probs_of(policy, after), atol=1e-4)
    assert after.weight_versions.tolist() == [1] * len(after.tokens)
    assert abs(float(after.log_probs[0] - before.log_probs[0])) > 1e-3


async def test_more_images_than_the_limit_are_refused_by_number(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig(max_images=1)) as engine:
        with pytest.raises(
            ValueError, match=r"shows 2 images, .* engine.max_images = 1; show fewer"
        ):
            await engine.generate([*said(0), Message(role="assistant", content="a"), *said(1)])


class TwoImages(TextTask):
    """Shows an image, and after the reply another one of another size.

    Args:
        lead: what the template has before a reply, so that the policy writes it too.
    """

    def __init__(self, lead: str = "") -> None:
        self._lead = lead

    async def setup(self, seed: int, options: Info) -> Ask:
        first = Message(role="user", images=(noise(seed),), content="first")
        choices = (f"{self._lead}a", f"{self._lead}b")
        return Ask((first,), options=ReplyOptions(format=ChoiceFormat(choices=choices)))

    async def reply(self, text: str) -> Ask | Done:
        if text in ("a", "b"):
            second = Message(role="user", images=(noise(9, 56, 84), noise(8)), content="second")
            form = RegexFormat(pattern=f"{self._lead}[0-9]")
            return Ask((second,), options=ReplyOptions(format=form))
        return Done(1.0, is_success=text.isdigit())


async def test_turns_with_images_in_them_are_one_row_with_the_log_probs_of_sampling(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    has_space = "Assistant:" in policy.render_text([Message(role="assistant", content="a")])
    spec = EnvSpec(id=f"{__name__}:TwoImages", kwargs={"lead": " " * has_space})
    async with (
        TorchChatEngine(policy, lane, EngineConfig(max_reply=16)) as engine,
        TextEnvPool(specs=[spec]) as pool,
        pool.lease(msgspec.structs.replace(EPISODE, env=spec)) as env,
    ):
        trajectory = await chat_agent(env, EpisodePolicy(engine, EPISODE))
    assert trajectory.is_success
    assert len(trajectory.final_observation["image_starts"]) == 3
    rows = flatten_trajectories([trajectory], [1.0])
    assert (len(rows), rows.num_decisions) == (1, 2)
    found, _ = policy.log_probs(policy.prepare(rows.observations), rows.tokens, torch.ones(1))
    for scored, step in zip(rows.split_by_decision(found.detach()), trajectory.steps, strict=True):
        np.testing.assert_allclose(scored, step.chunk.log_probs, atol=1e-4)
    other = noise(5)
    changed = {**trajectory.steps[1].observation, "image_0": other}
    steps = (trajectory.steps[0], msgspec.structs.replace(trajectory.steps[1], observation=changed))
    assert len(flatten_trajectories([msgspec.structs.replace(trajectory, steps=steps)], [1.0])) == 2
