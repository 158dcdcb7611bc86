"""Vision-language models of each family as language policies: the numbers of transformers, however
rows with and without images are read, and folders in the public layout.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from tiny_vision import FAMILIES, noise, tiny_vision, write_tiny_vision

from vla_rl.engines.chat_interface import make_question
from vla_rl.errors import CheckpointError, ConversationRejected
from vla_rl.models.language import CausalLanguageModel, TinyConfig, load_language_model, tiny
from vla_rl.models.language.image_chat import ImageChatFormat
from vla_rl.models.language.policy import chat_demonstration
from vla_rl.models.language.vision_policy import VisionLanguageModel
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE
from vla_rl.types import (
    ANY_REPLY,
    Message,
    Observation,
    ToolCall,
    ToolSpec,
    get_images,
    make_conversation_observation,
)

WIDE, TALL = noise(1, 140, 168), noise(2, 70, 40)
"""30 tokens in four windows of Qwen2.5-VL's tower; another size, changed to whole patches."""


TILE_NAMES = {
    "model.text_model.layers.0.self_attn.q_proj.weight",
    "model.vision_model.encoder.layers.0.self_attn.out_proj.bias",
    "model.connector.modality_projection.proj.weight",
    "lm_head.weight",
}

PUBLIC_NAMES = {
    "qwen2_5_vl": {
        "model.layers.0.self_attn.q_proj.bias",
        "visual.merger.mlp.0.weight",
        "visual.blocks.0.attn.qkv.weight",
        "lm_head.weight",
    },
    "qwen3_vl": {
        "model.language_model.layers.0.self_attn.q_norm.weight",
        "model.visual.deepstack_merger_list.1.linear_fc1.weight",
        "model.visual.pos_embed.weight",
    },
    "idefics3": TILE_NAMES,
    "smolvlm": TILE_NAMES,
}
"""Some tensors by the names of the public checkpoints."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("public") / "tiny"
    return write_tiny_vision(path, family=request.param)


@pytest.fixture(scope="module")
def policy(folder: Path) -> VisionLanguageModel:
    """Shared by tests that do not change it."""
    found = load_language_model(folder)
    assert isinstance(found, VisionLanguageModel)
    return found


def user(text: str, *images: np.ndarray) -> Message:
    return Message(role="user", images=images, content=text)


def observed(policy: VisionLanguageModel, *messages: Message) -> Observation:
    asked = make_question(policy, messages, (), ANY_REPLY)
    starts = [] if asked.image_prompt is None else asked.image_prompt.image_starts
    return make_conversation_observation(asked.tokens, asked.images, starts)


def chat_format(policy: VisionLanguageModel) -> ImageChatFormat:
    return ImageChatFormat(policy._processor, policy.stop_tokens, policy._reader)


def scored(
    policy: VisionLanguageModel, seen: list[Observation], replies: list[list[int]]
) -> list[np.ndarray]:
    """The log-probs of the replies."""
    tokens = torch.full((len(replies), max(map(len, replies))), -1)
    for line, reply in zip(tokens, replies, strict=True):
        line[: len(reply)] = torch.tensor(reply)
    found, _ = policy.log_probs(policy.prepare(seen), tokens, torch.ones(len(replies)))
    return [line[: len(reply)].detach().numpy() for line, reply in zip(found, replies, strict=True)]


def test_tokens_and_log_probs_are_those_of_transformers(
    policy: VisionLanguageModel, folder: Path
) -> None:
    messages = (
        user("which is larger?", WIDE, TALL),
        Message(role="assistant", content="the first"),
        user("and now?", noise(3)),
    )
    seen, reply = observed(policy, *messages), [20, 21, 22, 2]
    network = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    # SmolVLM2's own processor needs the package num2words, for videos; this one is its class of images
    kind: Any = (
        transformers.Idefics3Processor
        if network.config.model_type == "smolvlm"
        else transformers.AutoProcessor
    )
    processor = kind.from_pretrained(folder)
    text = chat_format(policy).render_text(messages, (), add_generation_prompt=True)
    inputs = processor(text=[text], images=[WIDE, TALL, noise(3)], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == seen["prompt_tokens"].tolist()
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([reply])], dim=1)
    for name in inputs.keys() & {"attention_mask", "mm_token_type_ids"}:
        added = torch.full((1, len(reply)), int(name == "attention_mask"))
        inputs[name] = torch.cat([inputs[name], added], dim=1)
    with torch.inference_mode():
        logits = network(**inputs).logits[0, -len(reply) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(reply)[:, None])[:, 0]
    (found,) = scored(policy, [seen], [reply])
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


def test_rows_with_and_without_images_do_not_see_each_other(policy: VisionLanguageModel) -> None:
    seen = [
        observed(policy, user("left?", WIDE)),
        observed(policy, user("no image")),
        observed(policy, user("two", TALL, noise(4))),
        observed(policy, user("a longer question without an image, so that none is packed " * 2)),
    ]
    replies = [[20, 21], [22, 2], [23, 24, 25, 2], [26]]
    alone = [scored(policy, [each], [reply])[0] for each, reply in zip(seen, replies, strict=True)]
    for chosen in ([0, 1, 2, 3], [0, 1], [1, 2]):  # padded, and packed on one line
        together = scored(policy, [seen[row] for row in chosen], [replies[row] for row in chosen])
        for row, found in zip(chosen, together, strict=True):
            np.testing.assert_allclose(found, alone[row], rtol=0, atol=1e-5)
    features = policy.features(policy.prepare(seen))
    torch.testing.assert_close(features[2:3], policy.features(policy.prepare(seen[2:3])))


def test_reading_on_in_a_slot_gives_the_logits_of_reading_all_at_once(
    policy: VisionLanguageModel,
) -> None:
    asked = make_question(policy, (user("left?", WIDE, TALL),), (), ANY_REPLY)
    plain = policy.render((user("what is this about?"),))
    memory, tokens = policy.key_values(3), [*asked.tokens.tolist(), 20, 21]
    policy.extend(
        memory, [2, 0], [0, 0], [tokens[:17], plain[:-1].tolist()], [asked.image_prompt, None]
    )
    found = policy.extend(memory, [2], [17], [tokens[17:-1]], [asked.image_prompt])
    last = policy.extend(
        memory, [0, 2], [len(plain) - 1, len(tokens) - 1], [[int(plain[-1])], tokens[-1:]],
        [None, asked.image_prompt],
    )  # fmt: skip
    starts = [] if asked.image_prompt is None else asked.image_prompt.image_starts
    seen = make_conversation_observation(asked.tokens, asked.images, starts)
    for logits, reply in ((found[0], [20, 21]), (last[1], [20, 21, 22])):
        expected = scored(policy, [seen], [reply])[0]
        own = torch.log_softmax(logits, dim=-1)[reply[-1]]
        assert float(own) == pytest.approx(float(expected[-1]), abs=1e-5)
    (expected,) = scored(policy, [{"prompt_tokens": plain}], [[20]])
    assert float(torch.log_softmax(last[0], dim=-1)[20]) == pytest.approx(expected[0], abs=1e-5)


def test_a_saved_folder_has_the_public_names_and_loads_by_itself(
    policy: VisionLanguageModel, tmp_path: Path, folder: Path
) -> None:
    policy = policy.copy()
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.01)
    policy.save(tmp_path / "saved")
    names = []
    for each in (folder, tmp_path / "saved"):
        with safe_open(each / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
            names.append(set(file.keys()))
    assert names[0] == names[1] > PUBLIC_NAMES[policy.network.config.model_type]  # type: ignore[union-attr,index]
    again = load_language_model(tmp_path / "saved")
    seen = observed(policy, user("left?", WIDE))
    assert isinstance(again, VisionLanguageModel)
    np.testing.assert_array_equal(
        scored(again, [seen], [[20, 21]])[0], scored(policy, [seen], [[20, 21]])[0]
    )
    other = tiny_vision(seed=1, family=policy.network.config.model_type)  # type: ignore[union-attr]
    other.load_checkpoint_tensors(policy.checkpoint_tensors())
    np.testing.assert_array_equal(
        scored(other.copy(), [seen], [[20]])[0], scored(policy, [seen], [[20]])[0]
    )


def test_letters_and_sampled_tokens_of_an_image_are_no_image(policy: VisionLanguageModel) -> None:
    mark = policy._processor.image_token
    said = Message(role="assistant", content=f"what is {mark}?")
    spelled, clean = (
        observed(policy, user("look", TALL), said, user(text)) for text in (f"{mark}!", "!")
    )
    token = policy.image_token
    assert (spelled["prompt_tokens"] == token).sum() == (clean["prompt_tokens"] == token).sum()
    assert (policy.tokenize(mark) != token).all()
    (found,) = scored(policy, [clean], [[token, 20]])
    assert np.isfinite(found).all()


def test_a_first_text_that_spells_an_image_is_refused(policy: VisionLanguageModel) -> None:
    mark = policy._processor.image_token
    for messages in (
        (user(f"what is {mark}?", TALL),),
        (Message(role="system", content=f"{mark} first"), user("look", TALL)),
    ):
        with pytest.raises(
            ConversationRejected, match=r"message 0 .* stands for an image; put"
        ) as told:
            policy.render(messages)
        assert not told.value.is_reply_at_fault


CUTS_THOUGHTS = """
{%- for message in messages %}
  {%- for part in (message.content if message.content is not string else [{"text": message.content}]) %}
    {{- "MARK" if part.type == "image" else part.text.split("<think>")[0] ~ part.text.split("</think>")[-1] }}
  {%- endfor %}
  {%- for call in message.tool_calls or [] %}{{- call.function.arguments|tojson }}{%- endfor %}
{%- endfor %}"""
"""Cuts thoughts out, so that what was around them is joined; images of a tool are not shown."""


def test_no_text_of_a_policy_makes_an_image(policy: VisionLanguageModel) -> None:
    chat = chat_format(policy)
    mark = policy._processor.image_token
    chat._template = CUTS_THOUGHTS.replace("MARK", mark)
    call = ToolCall(id="call_0", name="look", arguments=json.dumps({mark: [mark]}))
    said = Message(role="assistant", tool_calls=(call,))
    shown = policy._reader.size_tokens(*TALL.shape[:2]) == policy.image_token
    rendered = chat.render((user("look", TALL), said))
    assert (rendered == policy.image_token).sum() == shown.sum()
    joined = Message(role="assistant", content=f"{mark[:3]}<think>a thought</think>{mark[3:]}")
    with pytest.raises(ConversationRejected, match="rendered 2 images of 1") as caught:
        chat.render((user("look", TALL), joined))
    assert caught.value.is_reply_at_fault


def test_a_template_that_does_not_show_an_image_is_no_fault_of_the_reply(
    policy: VisionLanguageModel,
) -> None:
    chat = chat_format(policy)
    chat._template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ConversationRejected, match="rendered 0 images of 1") as caught:
        chat.render((user("look", TALL), Message(role="assistant", content="a")))
    assert not caught.value.is_reply_at_fault


def test_demonstrations_show_the_images_of_all_turns(policy: VisionLanguageModel) -> None:
    messages = (
        user("left?", WIDE),
        Message(role="assistant", content="a"),
        user("and here?", TALL),
        Message(role="assistant", content="b"),
    )
    demonstration = chat_demonstration(policy, messages)
    first = observed(policy, *messages[:1])
    assert demonstration.observation["prompt_tokens"].tolist() == first["prompt_tokens"].tolist()
    whole = np.concatenate([first["prompt_tokens"], demonstration.actions[0]])
    starts = demonstration.observation["image_starts"]
    for start, image in zip(starts, (WIDE, TALL), strict=True):
        tokens = policy._reader.size_tokens(*image.shape[:2])
        assert whole[start : start + len(tokens)].tolist() == tokens.tolist()
    assert starts.tolist()[:1] == first["image_starts"].tolist()
    assert get_images(demonstration.observation)[1] is TALL
    (found,) = scored(policy, [demonstration.observation], [demonstration.actions[0].tolist()])
    assert np.isfinite(found).all()
    assert demonstration.trained_tokens is not None
    # SmolVLM's template has a space before a reply, which the policy has to write
    lead = " " * ("Assistant:" in policy.render_text(messages))
    ended = policy.tokenize(f"{lead}a{policy._tokenizer.eos_token}")
    assert demonstration.trained_tokens.sum() == 2 * len(ended)


def test_a_frozen_tower_gets_no_gradient_and_the_trunk_does(policy: VisionLanguageModel) -> None:
    policy = policy.copy()
    policy.freeze_vision()
    seen = observed(policy, user("left?", TALL))
    found, _ = policy.log_probs(policy.prepare([seen]), torch.tensor([[20, 2]]), torch.ones(1))
    found.sum().backward()
    moved = {name for name, each in policy.network.named_parameters() if each.grad is not None}
    assert moved
    frozen = ("visual.", "vision_model.", "connector.")
    assert not any(part in name for name in moved for part in frozen)
    assert len(policy.blocks) == 3 + 2


def test_what_cannot_be_shown_is_refused_by_name(
    policy: VisionLanguageModel, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"image is float64 \[8, 8\], expected .* uint8 \[H, W, 3"):
        policy.render((user("look", np.zeros((8, 8))),))
    expected = (policy._reader.size_tokens(*WIDE.shape[:2]) == policy.image_token).sum()
    with pytest.raises(ValueError, match=f"has 0 image tokens, expected {expected} for its 1 ima"):
        policy.prepare_prompt(np.array([20, 21]), (WIDE,))
    add = ToolSpec(name="add", description="Add.", parameters={"type": "object", "properties": {}})
    with pytest.raises(ValueError, match="1 tools, but the chat template describes none"):
        policy.render((user("look", TALL),), (add,))
    with pytest.raises(CheckpointError, match=r"has a vision tower; load it with .*language_model"):
        CausalLanguageModel.load(folder)
    with pytest.raises(CheckpointError, match="has no vision tower"):
        VisionLanguageModel.load(ARITHMETIC_BASE)
    config = json.loads((folder / "config.json").read_text())
    other = shutil.copytree(folder, tmp_path / "llava")
    (other / "config.json").write_text(json.dumps({**config, "model_type": "llava"}))
    with pytest.raises(CheckpointError, match=r"the type 'llava', expected one of .*qwen3_vl"):
        load_language_model(other)
    reads_text = tiny(TinyConfig(hidden_size=32, num_heads=2, vocab_size=300), ["a"], seed=0)
    with pytest.raises(ValueError, match="1 images, but CausalLanguageModel reads text alone"):
        make_question(reads_text, (user("look", TALL),), (), ANY_REPLY)


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_tiles_of_another_size_than_the_towers_are_refused(family: str, tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "policy", family=family)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"max_image_size": {"longest_edge": 48}}
    file.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"max_image_size .* is 48 pixels, .* tiles of 32"):
        load_language_model(folder)
