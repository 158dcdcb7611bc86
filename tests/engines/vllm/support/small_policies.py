"""Policies that are served in the tests, small enough for a second of everything, and what they are
shown.
"""

import functools
from typing import Any

import msgspec
import numpy as np
import torch

from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny as tiny_speaker
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.prismatic.config import OpenVlaConfig
from vla_rl.types import Observation

TEXTS = (
    "what is 3 plus 4",
    "the sum of two numbers is a number",
    "open the drawer and close it again",
)


def oft_policy(seed: int = 0) -> OpenVlaOft:
    """Two cameras, proprioception, 8 steps of 7 numbers: 56 tokens a decision."""
    return OpenVlaOft.create(tiny(image_size=28), seed=seed)


def token_policy(seed: int = 0, **changes: Any) -> OpenVla:
    """One camera, 7 tokens a decision."""
    shape = tiny(image_size=28, cameras=("image",), proprio=None)
    shared = {
        name: getattr(shape, name)
        for name in OpenVlaConfig.__struct_fields__
        if name in type(shape).__struct_fields__ and name != "vocabulary"
    }
    return OpenVla.create(msgspec.structs.replace(OpenVlaConfig(**shared), **changes), seed=seed)


def completing_policy(seed: int = 0) -> CausalLanguageModel:
    """A Llama of two small blocks."""
    return _speaker(seed).copy()


@functools.cache
def _speaker(seed: int) -> CausalLanguageModel:
    """It is written to a folder and read again, for eight times the CPU time of a copy."""
    shape = TinyConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=128,
        vocab_size=320,
        context_size=256,
    )
    return tiny_speaker(shape, TEXTS, seed=seed)


def observe(seed: int) -> Observation:
    """Two images of noise, a state, and one of two instructions of different length."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (40, 40, 3), dtype=np.uint8),
        "wrist_image": rng.integers(0, 256, (40, 40, 3), dtype=np.uint8),
        "state": rng.uniform(-0.5, 0.5, 8).astype(np.float32),
        "instruction": ("open the drawer", "put the black bowl on the plate and turn on the stove")[
            seed % 2
        ],
    }


def log_prob_gap(
    policy: OpenVla | OpenVlaOft, observation: Observation, chunk: Any, temperature: float
) -> float:
    """Largest difference between an engine's log-probs and those of the learner's own network, for
    the same tokens.
    """
    with torch.inference_mode():
        log_probs, _ = policy.log_probs(
            policy.prepare([observation]),
            torch.from_numpy(chunk.tokens)[None],
            torch.tensor([temperature]),
        )
    return float((log_probs[0] - torch.from_numpy(chunk.log_probs)).abs().max())


def moved(policy: Any, seed: int) -> Any:
    """The same policy with every weight a little elsewhere."""
    other = policy.copy()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other
