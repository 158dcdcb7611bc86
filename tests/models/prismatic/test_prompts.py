"""Prompts as Llama's own vocabulary cuts them: the ids that public checkpoints were trained on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import OpenVlaOftConfig
from vla_rl.models.prismatic.processor import PrismaticProcessor, read_tokenizer

EXCERPT = Path(__file__).parent / "data" / "llama_vocabulary_excerpt.json"
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
