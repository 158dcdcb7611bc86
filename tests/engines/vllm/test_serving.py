"""What policies look like to an engine, images of conversations included; which cannot be served."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_policies import completing_policy, observe, oft_policy, token_policy
from tiny_vision import FAMILIES, noise, tiny_vision

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.chat_interface import make_question
from vla_rl.engines.vllm import VllmActionEngine, VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.launch import engine_arguments
from vla_rl.errors import ConfigError, ContextOverflow
from vla_rl.models.language import TinyConfig, VisionLanguageModel, tiny as tiny_speaker
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.vllm import serve
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    Message,
    Sampling,
    make_conversation_observation,
)

PAD = 1024
"""The id after the tiny vocabulary stands where something else is put in."""


def test_a_request_for_a_chunk_has_features_prompt_placeholders_and_stop_token_in_their_places() -> (
    None
):
    policy = oft_policy()
    request = serve(policy).request(observe(0))
    prompt = policy.prepare([observe(0)]).prompts[0].tolist()
    # two cameras of 2 x 2 patches and one token of proprioception; 8 x 7 placeholders; the stop
    # token is 2
    assert request.token_ids == [prompt[0], *[PAD] * 9, *prompt[1:], *[PAD] * 56, 2]
    (shown,) = request.features
    assert (shown.start, shown.length) == (1, 9)
    assert shown.values["images"].dtype == torch.uint8
    assert list(shown.values["images"].shape) == [2, 3, 28, 28]
    assert list(shown.values["proprio"].shape) == [8]


def test_a_request_for_single_tokens_ends_with_its_prompt() -> None:
    policy = token_policy()
    request = serve(policy).request(observe(1))
    prompt = policy.prepare([observe(1)]).prompts[0].tolist()
    assert request.token_ids == [prompt[0], *[PAD] * 4, *prompt[1:]]
    assert [set(each.values) for each in request.features] == [{"images"}]


def test_only_action_tokens_may_be_sampled_where_the_policy_says_so() -> None:
    assert list(serve(token_policy(vocabulary="actions")).layout.allowed_tokens or ()) == list(
        range(1024 - 256, 1024)
    )
    assert serve(token_policy()).layout.allowed_tokens is None


def test_the_wire_has_every_weight_once_and_adapters_merged() -> None:
    policy = oft_policy()
    adapted = policy.adapted(LoraConfig(rank=2), seed=0)
    assert (
        serve(adapted).tensors(adapted.network).keys()
        == serve(policy).tensors(policy.network).keys()
    )
    assert not [name for name in serve(adapted).tensors(adapted.network) if "lora" in name]


def test_a_language_model_is_served_as_its_own_folder_says() -> None:
    served = serve(completing_policy(), max_context=100)
    assert served.layout.config["architectures"] == ["LlamaForCausalLM"]
    assert (served.layout.context_size, served.layout.num_tokens) == (100, None)
    assert "tokenizer.json" in served.layout.files


def test_an_instruction_longer_than_the_context_is_refused() -> None:
    observation = observe(0) | {"instruction": "open the drawer " * 200}
    with pytest.raises(ContextOverflow, match="the context 256"):
        serve(token_policy()).request(observation)


def test_an_image_of_another_kind_is_refused_by_name() -> None:
    observation = observe(0) | {"image": np.zeros((4, 4), np.uint8)}
    with pytest.raises(ValueError, match=r"observation\['image'\] is uint8 \[4, 4\]"):
        serve(token_policy()).request(observation)


def test_policies_that_no_engine_computes_as_the_learner_does_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot serve MlpPolicy"):
        serve(
            MlpPolicy.create(
                MlpConfig(state_size=4, action_low=(0.0,), action_high=(1.0,), num_bins=2), seed=0
            )
        )
    with pytest.raises(ConfigError, match="has_film"):
        serve(OpenVlaOft.create(tiny(image_size=28, has_film=True), seed=0))
    shape = tiny(image_size=28)
    llm = msgspec.structs.replace(shape.llm, rope_inv_freq_dtype="bfloat16")
    with pytest.raises(ConfigError, match="rope_inv_freq_dtype"):
        serve(OpenVlaOft.create(msgspec.structs.replace(shape, llm=llm), seed=0))


def test_a_family_of_ones_own_is_served_by_the_function_that_it_names(import_folder: Path) -> None:
    (import_folder / "own_form.py").write_text(
        "def serve_own(policy, max_context, max_images):\n    return policy, max_context, max_images\n"
    )

    class Own:
        vllm_form = "own_form:serve_own"

    policy = Own()
    assert serve(policy, max_context=64) == (policy, 64, 1)


async def test_attention_heads_that_vllm_has_no_cpu_kernel_for_are_refused_before_a_process_starts() -> (
    None
):
    policy = tiny_speaker(TinyConfig(hidden_size=64, num_heads=4), ["open the drawer"], seed=0)
    async with DeviceLane(1) as lane:
        with pytest.raises(
            ConfigError,
            match="no CPU kernel for attention heads of 16 numbers, expected one of 32, 64",
        ):
            VllmChatEngine(serve(policy), lane, EngineConfig())


@pytest.mark.parametrize(
    "field",
    [
        "num_engines",
        "max_requests",
        "attempts",
        "health_every_s",
        "update_timeout_s",
        "drain_timeout_s",
    ],
)
def test_a_size_or_time_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        VllmConfig(**{field: 0})


def test_the_torch_engine_is_the_default() -> None:
    assert EngineConfig().kind == "torch"


@pytest.mark.needs_vllm
async def test_engines_refuse_what_they_cannot_do_before_they_start() -> None:

    async with DeviceLane(1) as lane:
        with pytest.raises(
            ConfigError, match="is_deterministic is True, expected False with engine 'vllm'"
        ):
            VllmActionEngine(serve(oft_policy()), lane, EngineConfig(is_deterministic=True))
        with pytest.raises(ConfigError, match="a CPU build of vLLM cannot sleep"):
            VllmActionEngine(
                serve(oft_policy()), lane, EngineConfig(vllm=VllmConfig(can_sleep=True))
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
# images of Idefics 3 are read by the same code as those of SmolVLM (`TileReader`)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.proof if each == "idefics3" else ())
        for each in FAMILIES
    ],
)
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
