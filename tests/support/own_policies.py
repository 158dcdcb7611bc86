"""Policies of one's own, as ranks load them: `StartsAsTheFileSays`."""

import os
import signal
from pathlib import Path

import torch

from vla_rl.models.mlp import MlpPolicy


class StartsAsTheFileSays(MlpPolicy):
    """An MLP; each time rank 1 loads it, it takes a line out of STARTS_FILE, and fails so."""

    @classmethod
    def load(cls, folder: Path) -> MlpPolicy:
        """Read the policy, unless the file says that the device is gone."""
        path = Path(os.environ.get("STARTS_FILE", ""))
        shared = torch.distributed.is_initialized()
        if shared and path.is_file() and torch.distributed.get_rank() == 1:
            how, _, later = path.read_text().partition("\n")
            path.write_text(later)
            if how == "RuntimeError":
                raise RuntimeError("the device is gone")
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load(folder)
