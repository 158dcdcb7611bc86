"""A V-JEPA 2 checkpoint of a few thousand parameters, on disk as transformers writes it; and made
trajectories.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms" / "srpo" / "support"))


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
