"""Copies between the host and a device, made so that the host waits as rarely as possible.

    host ─► device   from pinned memory, queued behind the device's work: the host goes on
    device ─► host   all tensors in one copy: the host waits once

On a CPU nothing is copied.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting; return it as it is if it is there."""
    if tensor.device.type != "cpu":
        return tensor.to(device)
    if device.type == "cuda":
        # from pageable memory, CUDA would first finish all work that is queued before the copy
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one device to the host in one copy, for which the host waits once."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    # bytes, so that numbers of several types travel together and arrive unchanged
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    pieces = torch.split(torch.cat(flat).cpu(), [len(part) for part in flat])
    return [
        # cloned: a piece may start at an address that does not suit its type
        piece.clone().view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
