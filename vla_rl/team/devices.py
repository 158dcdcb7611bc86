"""The device that a run computes on."""

import torch

from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import RunConfig


def resolve_device(config: RunConfig) -> torch.device:
    """Return the device that a run computes on.

    Raises: ConfigError if a GPU is requested and there is none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    reason = why_no_gpu()
    if reason is None:
        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError(
            f"RunConfig.device is 'cuda', but torch sees no GPU ({reason}); expected 'cpu' or "
            "'auto' on this machine, or what `vla-rl doctor` advises"
        )
    print(f"no GPU ({reason}): the policy and the learner compute on the CPU", flush=True)
    return torch.device("cpu")


def why_no_gpu() -> str | None:
    """Return why torch cannot compute on a GPU; None if it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        # `is_available` answers False for a driver that is too old as for none at all
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].rstrip(".")
    return "CUDA lists none"
