"""From observations to batches: prompts, frames, proprioception, clear words about what does not fit.

Prompts are cut as Llama's own vocabulary cuts them: the ids that public checkpoints were trained on.
"""

import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig, ProprioConfig
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, TINY_TOKENIZER
from vla_rl.models.prismatic.processor import PrismaticProcessor, format_prompt, read_tokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tokenizer.py"

MakeObservation = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_TOKENIZER))


def test_the_prompt_is_openvlas_question_in_lower_case() -> None:
    assert (
        format_prompt("Turn on the Stove") == "In: What action should the robot take to turn on "
        "the stove?\nOut: "
    )


def test_the_tiny_tokenizer_begins_with_bos_and_takes_any_text(tokenizer: Tokenizer) -> None:
    for text in ("turn on the stove", "Überraschung ☃", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 1
        assert 0 not in ids  # nothing is unknown
        assert tokenizer.decode(ids) == text


def test_the_tiny_tokenizer_leaves_room_for_the_action_tokens(
    tokenizer: Tokenizer, config: OpenVlaOftConfig
) -> None:
    assert tokenizer.get_vocab_size() <= config.llm.vocab_size - config.num_bins


def test_the_shipped_tokenizer_is_what_its_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "tokenizer.json"
    instructions = TINY_TOKENIZER.with_name("instructions.txt").read_text()
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads that stay
    monkeypatch.setattr(sys, "argv", ["make_tokenizer", str(made)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(instructions))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert made.read_text() == TINY_TOKENIZER.read_text()


def test_frames_stay_uint8_and_take_the_size_of_the_towers(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    batch = policy.prepare([make_observation(0), make_observation(1)])
    assert batch.images.dtype is torch.uint8
    assert batch.images.shape == (2, 2, 3, 28, 28)


def test_frames_of_the_right_size_are_not_touched(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    observation = make_observation(0)
    observation["image"] = np.ascontiguousarray(observation["image"][:28, :28])
    observation["wrist_image"] = np.ascontiguousarray(observation["wrist_image"][:28, :28])
    images = policy.prepare([observation]).images
    np.testing.assert_array_equal(images[0, 0].permute(1, 2, 0).numpy(), observation["image"])
    np.testing.assert_array_equal(images[0, 1].permute(1, 2, 0).numpy(), observation["wrist_image"])


def test_frames_of_different_sizes_fit_into_one_batch(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    small, large = make_observation(0), make_observation(1)
    small["image"] = np.ascontiguousarray(small["image"][:30, :30])
    together = policy.prepare([small, large])
    assert torch.equal(together.images[0], policy.prepare([small]).images[0])
    assert torch.equal(together.images[1], policy.prepare([large]).images[0])


def test_prompts_are_padded_on_the_right(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    short, long = "push", "put both moka pots on the stove"
    batch = policy.prepare([make_observation(0, short), make_observation(0, long)])
    lengths = batch.prompt_lengths.tolist()
    assert lengths[0] < lengths[1] == batch.prompts.shape[1]
    assert batch.prompts[:, 0].tolist() == [1, 1]
    assert set(batch.prompts[0, lengths[0] :].tolist()) == {policy.config.llm.pad_token_id}


def test_proprioception_is_scaled_by_its_bounds_and_clipped(
    config: OpenVlaOftConfig, tokenizer: Tokenizer
) -> None:
    proprio = ProprioConfig(key="arm", low=(0.0, -10.0, 0.0), high=(4.0, 10.0, 1.0))
    processor = PrismaticProcessor(config, tokenizer, proprio)
    frame = np.zeros((28, 28, 3), np.uint8)
    observation = {
        "image": frame,
        "wrist_image": frame,
        "instruction": "go",
        "arm": np.array([1.0, 0.0, 7.0]),
    }
    scaled = processor.prepare([observation], torch.device("cpu")).proprio
    assert scaled is not None
    np.testing.assert_allclose(scaled.numpy(), [[-0.5, 0.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("constant", "expected"), [("zero", [0.0, 0.0, 0.0, 0.5]), ("ends", [-1.0, -1.0, 1.0, 0.5])]
)
def test_a_dimension_that_never_changed_is_zero_or_one_of_the_ends(
    constant: Any, expected: list[float], config: OpenVlaOftConfig, tokenizer: Tokenizer
) -> None:
    """Values at, below and above the constant, worked out by hand: 2 (x - low) / 1e-8 - 1 is -1,
    far below, far above.
    """
    proprio = ProprioConfig(
        low=(0.25, 0.25, 0.25, 0.0), high=(0.25, 0.25, 0.25, 1.0), constant=constant
    )
    processor = PrismaticProcessor(config, tokenizer, proprio)
    frame = np.zeros((28, 28, 3), np.uint8)
    state = np.array([0.25, 0.249, 0.251, 0.75], np.float32)
    observation = {"image": frame, "wrist_image": frame, "instruction": "go", "state": state}
    scaled = processor.prepare([observation], torch.device("cpu")).proprio
    assert scaled is not None
    np.testing.assert_allclose(scaled.numpy(), [expected], atol=1e-6)


def test_the_dino_constants_are_those_rounded_to_bfloat16() -> None:
    dino = (PUBLIC_PIXELS.means[0], PUBLIC_PIXELS.stds[0])
    for exact, rounded in zip(((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), dino, strict=True):
        assert torch.tensor(exact).bfloat16().tolist() == list(rounded)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        (
            "image",
            np.zeros((3, 28, 28), np.uint8),
            r"observation\['image'\] is uint8 \[3, 28, 28\], expected uint8",
        ),
        (
            "image",
            np.zeros((28, 28, 3), np.float32),
            r"is float32 \[28, 28, 3\], expected uint8 \[H, W, 3\]",
        ),
        ("wrist_image", None, r"observation\['wrist_image'\] is NoneType"),
        (
            "state",
            np.zeros(7, np.float32),
            r"observation\['state'\] is float32 \[7\], expected float32 \[8\]",
        ),
        ("instruction", 3, r"observation\['instruction'\] is int, expected the task in words"),
    ],
)
def test_what_does_not_fit_is_named(
    policy: OpenVlaOft, make_observation: MakeObservation, key: str, value: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        policy.prepare([make_observation(0) | {key: value}])


EXCERPT = Path(__file__).parents[1] / "data" / "llama_vocabulary_excerpt.json"
"""Of Llama 2's 32,000 pieces and 61,249 merges those that the two prompts below consist of: ids,
and merges in order."""

IDS = {
    "pick up the black bowl between the plate and the ramekin and place it on the plate": (
        "1 512 29901 1724 3158 881 278 19964 2125 304 5839 701 278 4628 12580 29880 1546 278 "
        "15284 322 278 364 420 9089 322 "
        "2058 372 373 278 15284 29973 13 3744 29901 29871"
    ),
    "Put both the alphabet soup and the tomato sauce in the basket": (
        "1 512 29901 1724 3158 881 278 19964 2125 304 1925 1716 278 22968 22300 322 278 6454 1219 "
        "12507 346 297 278 25972 "
        "29973 13 3744 29901 29871"
    ),
}
"""As transformers' tokenizer of the public checkpoints gives them; the last one is the bare space
that is answered."""


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The excerpt as a `tokenizer.json` with the steps of the public one."""
    pieces: dict[str, Any] = json.loads(EXCERPT.read_text())
    merges = [tuple(pair) for pair in pieces["merges"]]
    bpe = models.BPE(
        vocab=pieces["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken("<PAD>", special=True)])
    file = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def test_prompts_have_the_ids_that_public_checkpoints_know(tokenizer_file: Path) -> None:
    config = OpenVlaOftConfig(
        tokenizer_file=str(tokenizer_file),
        action_bounds=LIBERO_BOUNDS["libero_10"],
        images="bicubic",
        cameras=("image",),
    )
    processor = PrismaticProcessor(config, read_tokenizer(config))
    frame = np.zeros((224, 224, 3), np.uint8)
    batch = processor.prepare(
        [{"image": frame, "instruction": task} for task in IDS], torch.device("cpu")
    )
    expected = [[int(number) for number in ids.split()] for ids in IDS.values()]
    assert batch.prompt_lengths.tolist() == [len(ids) for ids in expected] == [35, 29]
    for row, ids in zip(batch.prompts.tolist(), expected, strict=True):
        assert row == ids + [config.llm.pad_token_id] * (35 - len(ids))


def refused(tokenizer_file: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """What is said of the tokenizer with a change in its file."""
    written = json.loads(tokenizer_file.read_text())
    change(written)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(written))
    with pytest.raises(ConfigError) as caught:
        read_tokenizer(
            OpenVlaOftConfig(tokenizer_file=str(file), action_bounds=LIBERO_BOUNDS["libero_10"])
        )
    return str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_policy_is_refused(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    def change(written: dict[str, Any]) -> None:
        written["model"]["vocab"]["one too many"] = 32001

    said = refused(tokenizer_file, tmp_path, change)
    assert "which has ids up to 32001, expected none beyond 32000" in said


def test_a_tokenizer_that_begins_with_no_bos_is_refused(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    said = refused(tokenizer_file, tmp_path, lambda written: written.update(post_processor=None))
    assert "do not begin with <s> (id 1)" in said


def test_padding_and_truncation_that_a_tokenizer_brings_do_not_count(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(max_length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = OpenVlaOftConfig(
        tokenizer_file=str(tmp_path / "tokenizer.json"), action_bounds=LIBERO_BOUNDS["libero_10"]
    )
    task = next(iter(IDS))
    assert len(read_tokenizer(config).encode(f"In: {task}").ids) > 8
    assert len(read_tokenizer(config).encode(f"In: {task}").ids) < 64
