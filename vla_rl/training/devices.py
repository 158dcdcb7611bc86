"""The device that a run computes on."""

import torch

from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import RunConfig


def device_of(config: RunConfig) -> torch.device:
    """Return the device that a run computes on.

    Raises: ConfigError if a GPU is requested and there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "RunConfig.device is 'cuda', but torch sees no GPU; expected 'cpu' or "
            "'auto' on this machine"
        )
    if config.device == "auto" and not torch.cuda.is_available():
        print("no GPU: the policy and the learner compute on the CPU", flush=True)
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
