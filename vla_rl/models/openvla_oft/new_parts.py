"""New parts that fine-tuning adds to a checkpoint, to turn OpenVLA into OpenVLA-OFT (Kim et al.
2025, section IV).

An action head, a proprio projector and FiLM are new modules beside pretrained weights. They have to
be requested by name, so that a part that is missing by mistake remains an error.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla_oft.config import NewPart


def require_known(parts: Collection[NewPart]) -> None:
    """Raise ConfigError if a name is not a known part."""
    known = get_args(NewPart)
    if isinstance(parts, str) or any(part not in known for part in parts):
        raise ConfigError(f"new_parts is {parts!r}, expected some of {', '.join(known)}")


def require_new(
    parts: Collection[NewPart], network: nn.Module, held: Iterable[str], folder: Path
) -> None:
    """Raise CheckpointError unless the network has these parts and the checkpoint has none of their
    tensors (`held`).
    """
    for part in parts:
        if getattr(network, part) is None:
            raise CheckpointError(
                f"a policy with this head has no {part}; leave it out of the new parts of {folder}."
            )
        found = next((name for name in held if name.startswith(f"{part}.")), None)
        if found is not None:
            raise CheckpointError(
                f"{folder} has {found}, so its {part} is not new; leave it out of the new parts."
            )


def begin_anew(
    parts: Collection[NewPart],
    network: nn.Module,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Initialise parts of a network that is on the meta device.

    The global random state is left unchanged.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for part in parts:
            module: nn.Module = getattr(network, part)
            module.to_empty(device="cpu")
            # an outer module may override the values of its inner ones
            for inner in reversed(list(module.modules())):
                reset: Any = getattr(inner, "reset_parameters", None)
                if reset is not None:
                    reset()
            module.to(device=device, dtype=dtype)
