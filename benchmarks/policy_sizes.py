"""The policies and observations of `policy_inference` and `learner_step`, by size."""

from typing import Literal

import msgspec
import numpy as np
import torch

from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig, tiny, unit_bounds
from vla_rl.models.prismatic.config import TINY_TOKENIZER, LoraConfig, PrismaticConfig
from vla_rl.types import Observation

Size = Literal["tiny", "7b"]

FRAME_SIDE = 224


def make_policy(size: Size, device: torch.device, lora: LoraConfig | None = None) -> OpenVlaOft:
    """Make a policy with random weights; 7B has the shape of the public checkpoints, in bfloat16,
    built on the device.
    """
    if size == "tiny":
        policy = OpenVlaOft.create(msgspec.structs.replace(tiny(), lora=lora), seed=0)
        policy.network.to(device)
        return policy
    config = OpenVlaOftConfig(
        tokenizer_file=str(TINY_TOKENIZER), action_bounds=unit_bounds(7), lora=lora
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return OpenVlaOft.create(msgspec.structs.replace(config, images="bicubic"), seed=0)
    finally:
        torch.set_default_dtype(before)


def make_observation(config: PrismaticConfig, seed: int) -> Observation:
    """Make an observation of noise for the configured cameras and proprioception."""
    rng = np.random.default_rng(seed)
    frames = {
        key: rng.integers(0, 256, (FRAME_SIDE, FRAME_SIDE, 3), dtype=np.uint8)
        for key in config.cameras
    }
    state = rng.uniform(-0.5, 0.5, 8).astype(np.float32)
    return {
        **frames,
        "state": state,
        "instruction": "pick up the cream cheese and place it in the basket",
    }
