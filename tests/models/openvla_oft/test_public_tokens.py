"""OpenVLA-OFT with action tokens as it is published, one or two pictures, held against timm and
transformers alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import public_checkpoint
import pytest
import torch

from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.types import Sampling

INSTRUCTIONS = ("push", "pick up the black bowl on the stove and place it on the plate")


@pytest.fixture(scope="module")
def parts() -> public_checkpoint.Parts:
    return public_checkpoint.Parts(seed=3)


@pytest.fixture(scope="module")
def folder(parts: public_checkpoint.Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "tokens"
    public_checkpoint.write(folder, parts, TINY_TOKENIZER)
    return folder


def observation_of(instruction: str) -> dict[str, Any]:
    rng = np.random.default_rng(len(instruction))
    frames = {
        key: rng.integers(0, 256, (28, 28, 3), dtype=np.uint8) for key in ("image", "wrist_image")
    }
    return {**frames, "state": rng.uniform(-1, 1, 8).astype(np.float32), "instruction": instruction}


def decided(policy: OpenVlaOft, parts: public_checkpoint.Parts) -> None:
    """Greedy tokens and log-probs of both prompts in one batch are those of each alone, by the
    libraries.
    """
    observations = [observation_of(instruction) for instruction in INSTRUCTIONS]
    batch = policy.prepare(observations)
    with torch.no_grad():
        tokens, log_probs = policy.sample(batch, [Sampling(greedy=True)] * len(observations))
        for row, observation in enumerate(observations):
            prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
            proprio = None if batch.proprio is None else batch.proprio[row]
            hidden = parts.read(list(batch.images[row]), prompt, proprio, num_numbers=56)
            first = public_checkpoint.VOCABULARY - 256
            logits = parts.llm.lm_head(hidden)[:, first : first + 256]
            assert tokens[row].tolist() == (logits.argmax(-1) + first).tolist()
            expected = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(log_probs[row], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cameras", [("image",), ("image", "wrist_image")])
def test_one_picture_or_two_decide_as_the_libraries_alone_say(
    cameras: tuple[str, ...], folder: Path, parts: public_checkpoint.Parts
) -> None:
    decided(OpenVlaOft.load(folder, norm_key="libero_goal", cameras=cameras), parts)


def test_a_proprio_projector_may_stand_beside_the_weights_of_a_token_policy(
    parts: public_checkpoint.Parts, tmp_path: Path
) -> None:
    public_checkpoint.write(tmp_path / "tokens", parts, TINY_TOKENIZER)
    parts.write_parts(tmp_path / "tokens")
    (tmp_path / "tokens" / "action_head--150000_checkpoint.pt").unlink()
    decided(OpenVlaOft.load(tmp_path / "tokens", norm_key="libero_goal"), parts)


def test_a_dialect_without_a_stop_token_decides_otherwise(folder: Path) -> None:
    official, bare = (
        OpenVlaOft.load(folder, norm_key="libero_goal", dialect=name)
        for name in ("rlinf_official", "rlinf")
    )
    observation = observation_of(INSTRUCTIONS[1])
    with torch.no_grad():
        one, other = (policy.network(policy.prepare([observation])) for policy in (official, bare))
    assert (
        bare.config.llm.rope_inv_freq_dtype == official.config.llm.rope_inv_freq_dtype == "bfloat16"
    )
    assert (one - other).abs().max() > 1e-3
