"""Conversations with images in the in-process engine: what is sampled is what the learner finds, what
is kept is never another image's, and turns with images in them are one row.
"""

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from tiny_vision import noise, tiny_vision

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
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
    observed_conversation,
)

EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="x", seed=0, policy_seed=0
)


@pytest.fixture
def policy() -> VisionLanguageModel:
    return tiny_vision()


def said(seed: int) -> tuple[Message, ...]:
    return (Message(role="user", images=(noise(seed, 84, 56),), content="what is it?"),)


def log_probs_of(policy: VisionLanguageModel, reply: Completion) -> np.ndarray:
    seen = observed_conversation(reply.prompt_tokens, reply.images, reply.image_starts)
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


async def test_new_weights_read_the_images_again(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    async with TorchChatEngine(policy, lane, EngineConfig()) as engine:
        before = await engine.generate(said(0), sampling=Sampling(seed=7), max_tokens=4)
        with torch.no_grad():
            for parameter in policy.network.model.visual.parameters():  # type: ignore[union-attr]
                parameter.mul_(0.5)
        await lane.run(engine.adopt, policy.network, 1, work="update")
        after = await engine.generate(said(0), sampling=Sampling(seed=7), max_tokens=4)
    np.testing.assert_allclose(after.log_probs, log_probs_of(policy, after), atol=1e-4)
    assert after.weight_versions.tolist() == [1] * len(after.tokens)
    assert abs(float(after.log_probs[0] - before.log_probs[0])) > 1e-3


class TwoImages(TextTask):
    """Shows an image, and after the reply another one of another size."""

    async def setup(self, seed: int, options: Info) -> Ask:
        first = Message(role="user", images=(noise(seed),), content="first")
        return Ask((first,), options=ReplyOptions(format=ChoiceFormat(choices=("a", "b"))))

    async def reply(self, text: str) -> Ask | Done:
        if text in ("a", "b"):
            second = Message(role="user", images=(noise(9, 56, 84), noise(8)), content="second")
            return Ask((second,), options=ReplyOptions(format=RegexFormat(pattern="[0-9]")))
        return Done(1.0, is_success=text.isdigit())


async def test_turns_with_images_in_them_are_one_row_with_the_log_probs_of_sampling(
    policy: VisionLanguageModel, lane: DeviceLane
) -> None:
    spec = EnvSpec(id=f"{__name__}:TwoImages")
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
