"""Load any language policy: one of text, or one that reads images too."""

from pathlib import Path

import torch

from vla_rl.models.language import checkpoint
from vla_rl.models.language.policy import CausalLanguageModel
from vla_rl.models.language.vision_policy import VisionLanguageModel


def load_language_model(
    source: str | Path, *, dtype: torch.dtype = torch.float32
) -> CausalLanguageModel:
    """Load a checkpoint from a local folder, or from the hub by its id, as the kind that its
    `config.json` names; safetensors only, and none of its code is run.

    Raises: CheckpointError naming what is missing or does not fit.
    """
    folder = checkpoint.local_folder(source)
    kind = VisionLanguageModel if checkpoint.has_vision(folder) else CausalLanguageModel
    return kind.load(folder, dtype=dtype)
