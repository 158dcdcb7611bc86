"""The norm of gradients that lie on several meshes, the same number on every rank.

Each number counts once, although some ranks hold copies:

    layers that are cut      on one rank each
    norms between them       on every rank of a tensor group
    all the rest             on one rank each, or on all of them if nothing is shared
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def norm_over_ranks(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all ranks, each of which has to call it.

    torch's own norm takes one mesh, and adds up one dimension of it after the other, in an order
    that may differ between ranks: they would clip, and skip, differently.
    """
    if not gradients:
        return torch.zeros(())
    parts: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        parts.setdefault(_num_copies(gradient), []).append(gradient.to_local())
    squares = [nn.utils.get_total_norm(each).square() / copies for copies, each in parts.items()]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()


def _num_copies(tensor: DTensor) -> int:
    """Return the number of ranks that hold the same numbers."""
    mesh = tensor.device_mesh
    inside = math.prod(
        mesh.size(dim) for dim, each in enumerate(tensor.placements) if each.is_replicate()
    )
    return inside * (dist.get_world_size() // mesh.size())
