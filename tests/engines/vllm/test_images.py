"""Conversations with images on vLLM: it reads the tokens and the pixels that the learner reads."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, noise, tiny_vision

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.chat_interface import make_question
from vla_rl.engines.vllm import VllmChatEngine
from vla_rl.engines.vllm.launch import engine_arguments
from vla_rl.models.language import VisionLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    Message,
    Sampling,
    make_conversation_observation,
)

TOLERANCE = 1e-4
FIRST = Message(role="user", images=(noise(1, 56, 84),), content="left?")
SECOND = Message(role="user", images=(noise(2, 112, 84), noise(1, 56, 84)), content="right?")


def gap(policy: VisionLanguageModel, reply: Completion) -> float:
    """The largest difference from the learner's log-probs, computed from the reply's own ids."""
    seen = make_conversation_observation(reply.prompt_tokens, reply.images, reply.image_starts)
    tokens = torch.from_numpy(reply.tokens)[None]
    with torch.inference_mode():
        found, _ = policy.log_probs(policy.prepare([seen]), tokens, torch.ones(1))
    return float((found[0] - torch.from_numpy(reply.log_probs)).abs().max())


async def converse(engine: Any, seed: int) -> list[Completion]:
    """Both turns of a conversation with images in each, and a question without."""
    sampling = Sampling(seed=seed)
    first = await engine.generate([FIRST], sampling=sampling)
    second = await engine.generate([FIRST, first.message, SECOND], sampling=sampling)
    text = await engine.generate([Message(role="user", content="left?")], sampling=sampling)
    return [first, second, text]


@pytest.mark.needs_vllm
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probs_of_two_turns_with_images_are_those_of_the_learner_before_and_after_an_update(
    family: str,
) -> None:
    before, after = tiny_vision(family=family), tiny_vision(seed=1, family=family)
    config = EngineConfig(kind="vllm", max_reply=8)
    async with (
        DeviceLane(1) as lane,
        VllmChatEngine(serve(before, max_images=3), lane, config) as engine,
    ):
        # several at a time: vLLM joins the patches of their images into one batch
        replies = await asyncio.gather(*(converse(engine, seed) for seed in range(3)))
        assert max(gap(before, each) for turns in replies for each in turns) < TOLERANCE
        await lane.run(engine.apply_weights, after.network, 1)
        # the same images: what the old tower made of them must not be reused
        for reply in await converse(engine, 4):
            assert gap(after, reply) < TOLERANCE
            assert gap(before, reply) > 0.01
            assert set(reply.weight_versions.tolist()) == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_holds_the_ids_and_pixels_of_the_learner_and_names_images_by_their_sha256(
    family: str,
) -> None:
    policy = tiny_vision(family=family)
    asked = make_question(policy, (FIRST, SECOND), (), ANY_REPLY)
    request = serve(policy, max_images=3).request(asked)
    starts = [] if asked.image_prompt is None else asked.image_prompt.image_starts.tolist()
    seen = make_conversation_observation(asked.tokens, asked.images, starts)
    (images,) = policy.prepare([seen]).images
    assert images is not None
    assert request.token_ids == seen["prompt_tokens"].tolist()
    assert [each.start for each in request.features] == starts
    sent = torch.cat([each.rows["pixel_values"] for each in request.features])
    torch.testing.assert_close(sent, images.pixels, rtol=0, atol=0)
    for image, feature in zip(asked.images, request.features, strict=True):
        content = hashlib.sha256(str(image.shape).encode() + image.tobytes()).hexdigest()
        assert feature.digest == content
        placeholders = np.array(request.token_ids)[feature.start :][: feature.length]
        is_part = np.ones(feature.length) if feature.is_part is None else feature.is_part.numpy()
        assert ((placeholders == policy.image_token) == is_part).all()
    assert request.features[0].digest == request.features[2].digest != request.features[1].digest


def test_an_engine_hashes_images_without_a_package_of_its_own_and_normalises_none() -> None:
    layout = serve(tiny_vision(), max_images=3).layout
    config = EngineConfig(kind="vllm").vllm
    given = engine_arguments(Path("x"), layout, config, build="cpu", dtype="float32")
    assert given["mm_hasher_algorithm"] == "sha256"
    assert given["mm_device_do_normalize"] is False
    assert given["limit_mm_per_prompt"] == {"image": 3, "video": 0}
