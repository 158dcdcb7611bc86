"""V-JEPA 2 as SRPO's trajectory encoder: videos to vectors.

Its configuration is `vla_rl.algorithms.VJepa2Config`.
"""

from vla_rl.models.vjepa2.checkpoint import check_folder, load_encoder
from vla_rl.models.vjepa2.encoder import VJepa2Encoder
from vla_rl.models.vjepa2.video import preprocess, sample_frames

__all__ = ["VJepa2Encoder", "check_folder", "load_encoder", "preprocess", "sample_frames"]
