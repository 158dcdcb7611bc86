"""Small policies, checkpoints, observations for the tests of the models."""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from vla_rl.engines import DeviceLane
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig, tiny

for helpers in ("golden",):
    sys.path.insert(0, str(Path(__file__).parent / helpers))


@pytest_asyncio.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


@pytest.fixture(scope="session")
def config() -> OpenVlaOftConfig:
    return tiny(image_size=28)


@pytest.fixture(scope="session")
def policy(config: OpenVlaOftConfig) -> OpenVlaOft:
    """Shared by tests that do not change it."""
    return OpenVlaOft.create(config, seed=0)


@pytest.fixture(scope="session")
def make_observation() -> Callable[..., dict[str, Any]]:
    def make(seed: int, instruction: str = "turn on the stove") -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {
            "image": rng.integers(0, 256, (40, 40, 3), dtype=np.uint8),
            "wrist_image": rng.integers(0, 256, (40, 40, 3), dtype=np.uint8),
            "state": rng.normal(size=8).astype(np.float32) * 0.1,
            "instruction": instruction,
        }

    return make


@pytest.fixture(scope="session")
def vjepa2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import VJEPA2Config, VJEPA2Model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VJEPA2Model(
            VJEPA2Config(
                crop_size=64,
                frames_per_clip=16,
                hidden_size=48,
                num_attention_heads=2,
                num_hidden_layers=2,
                pred_hidden_size=24,
                pred_num_attention_heads=2,
                pred_num_hidden_layers=1,
            )
        )
    folder = tmp_path_factory.mktemp("vjepa2")
    model.save_pretrained(folder)
    return str(folder)
