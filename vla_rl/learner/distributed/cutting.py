"""Tensor parallelism on a network: its layers are cut over the ranks of a tensor group, in place.

FSDP comes after it, and shards each rank's cut over the ranks with other rows (`parallel`).
"""

from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vla_rl.learner.tensor_plan import TensorPlan


def cut(network: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the layers in a plan.

    Args:
        network: whole, and the same on every rank of the group.
        plan: the layers, by their names in `network`.
        mesh: the group.
    """
    frozen = {name for name, each in network.named_parameters() if not each.requires_grad}
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in plan.by_outputs}
    styles |= {name: RowwiseParallel() for name in plan.by_inputs}
    # [B, L, heads, head_dim]: each rank's heads give a part of the gradient, which is added up
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    styles |= dict.fromkeys(plan.of_heads, heads)
    # every rank has loaded the same weights, so that none has to send them
    parallelize_module(network, mesh, styles, src_data_rank=None)
    for name, each in network.named_parameters():
        each.requires_grad_(name not in frozen)


class LocalOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows an outer mode, such as a counter, this rank's part of each operation and not the whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor asks again, with the parts
        given = kwargs or {}
        if any(isinstance(each, FakeTensor) for each in tree_leaves((args, given))):
            with _disable_current_modes():  # DTensor learns the shapes of a whole result, once
                return func(*args, **given)
        return func(*args, **given)
