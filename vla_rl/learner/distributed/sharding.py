"""How a network is sharded over the ranks: FSDP2, tensor parallelism, the norm of its gradients.

    gradients   weights whole during an update; masters, moments and reduced gradients in shards
    weights     weights in shards too, gathered block by block in each pass
    replicas    nothing in shards, gradients added over the ranks

Parameters that are not trained keep their type and stay whole on every rank. With tensor
parallelism, layers are cut over the ranks of a tensor group first; then FSDP shards blocks with cut
layers over the ranks that have other rows, and everything else over all ranks:

    tensor_parallel = 2            all: everything outside of the layers that are cut
        rank 0   rank 1            rows: ranks 0 and 2, ranks 1 and 3; FSDP of cut layers
        rank 2   rank 3            tensor: ranks 0 and 1, ranks 2 and 3; same rows, other heads

Without tensor parallelism, `rows` is `all`. In the norm each number counts once, although some ranks
hold copies:

    layers that are cut      on one rank each
    norms between them       on every rank of a tensor group
    all the rest             on one rank each, or on all of them if nothing is shared
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
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

from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.distributed.rank_times import RankClock
from vla_rl.learner.plan import TensorPlan


class Meshes:
    """The meshes of one group of ranks; each rank makes them once, at the same time.

    Args:
        config: number of ranks, and what each holds.
        device: kind of device, such as `cpu`.
    """

    def __init__(self, config: LearnerConfig, device: str) -> None:
        self.tensor_size = config.tensor_parallel
        """Number of ranks that share layers."""

        self.tensor: DeviceMesh | None = None
        """This rank's tensor group; None without tensor parallelism."""

        # replicas: a second dimension of size 1, over which nothing is shared
        over = ("replicas", "shards") if config.shard == "replicas" else ("rows",)
        ones = (1,) * (len(over) - 1)
        if self.tensor_size == 1:
            self.all = init_device_mesh(device, (config.ranks, *ones), mesh_dim_names=over)
            self.rows = self.all
            return
        sizes = (config.row_groups, *ones, self.tensor_size)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=(*over, "tensor"))
        self.rows, self.tensor = mesh[over], mesh["tensor"]
        if config.shard == "replicas":
            # not (ranks, 1): FSDP2 divides gradients twice if shards are not shared (torch 2.13)
            self.all = mesh["replicas", "tensor"]
        else:
            self.all = init_device_mesh(device, (config.ranks,), mesh_dim_names=("ranks",))


def cut_layers(network: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the layers in a plan.

    Args:
        network: whole, and the same on every rank of the group.
        plan: the layers, by their names in `network`.
        mesh: the group.
    """
    frozen = {name for name, each in network.named_parameters() if not each.requires_grad}
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in plan.by_outputs}
    # after a cut by outputs: between the two layers no rank needs the others' numbers, and one sum
    # is all that is sent
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
    # divided by the number of copies, because the sum over all ranks counts each of them
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


Shard: TypeAlias = Literal["gradients", "weights", "replicas"]


class PolicyModule(nn.Module):
    """A policy's `log_probs`, `predict` and `features` as forward passes of one module.

    FSDP gathers weights before `forward` only, and families enter their networks by other methods
    too: a language policy by its trunk and then its head.
    """

    def __init__(self, model: TokenModel[Any]) -> None:
        super().__init__()
        self.network = model.network
        self._policy = model

    def log_probs(self, batch: Any, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies."""
        log_probs, entropy = self("log_probs", batch, tokens, temperatures)
        return log_probs, entropy

    def predict(self, batch: Any, tokens: Tensor, temperatures: Tensor, predicts: str) -> Any:
        """Compute a flow policy's `Predictions`."""
        return self("predict", batch, tokens, temperatures, predicts)

    def features(self, batch: Any) -> Tensor:
        """Compute the features that a critic reads."""
        (features,) = self("features", batch)
        assert isinstance(features, Tensor)
        return features

    def forward(self, what: str, *inputs: Any) -> tuple[Tensor, ...]:
        """Call a method of the policy."""
        # one module with one entry: FSDP gathers before `forward` alone, and another entry would
        # compute with shards
        found = getattr(self._policy, what)(*inputs)
        tensors = (found,) if isinstance(found, Tensor) else found
        # copies: an operation in place on a view would drop FSDP's hook, and with it the gathering
        return tuple(each.clone() for each in tensors)


class ShardedModule:
    """A module whose trained parameters are shared by the ranks of a mesh.

    Args:
        module: the module, whole, on the device of this rank; it is sharded in place.
        meshes: the ranks.
        shard: what each rank holds.
        blocks: its repeated blocks, each a group of its own.
        cut_by: a network inside of it, and the layers of that which tensor parallelism cuts; None
            if it cuts none.
        dtype: type that it computes in.
        exact: parts that compute in float32 whatever `dtype` is.
        shares_frozen: share frozen parameters too, instead of keeping them whole on every rank.
        offload: keep shards of weights and gradients in host memory, so that the optimizer's state
            is there too.
    """

    def __init__(
        self,
        module: nn.Module,
        meshes: Meshes,
        shard: Shard,
        *,
        blocks: Iterable[nn.Module],
        cut_by: tuple[nn.Module, TensorPlan] | None = None,
        dtype: torch.dtype,
        exact: Iterable[nn.Module] = (),
        shares_frozen: bool = False,
        offload: bool = False,
    ) -> None:
        self.module = module
        self.dtypes = {
            name: each.dtype for name, each in module.named_parameters() if each.requires_grad
        }
        """Types in which one process holds the trained parameters, by name."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                # the shard is the master: an update is smaller than the steps of bfloat16
                parameter.data = parameter.data.float()
        if cut_by is not None and meshes.tensor is not None:
            cut_layers(*cut_by, meshes.tensor)
        frozen = {each for each in module.parameters() if not each.requires_grad}
        device = next(module.parameters()).device.type
        options: dict[str, Any] = {
            "reshard_after_forward": shard == "weights",
            "ignored_params": set() if shares_frozen else frozen,
            "offload_policy": _offload_policy(device) if offload else OffloadPolicy(),
        }
        for part in exact:
            fully_shard(part, mesh=meshes.all, mp_policy=_precision(torch.float32), **options)
        # each block is a group: the next one is gathered while this one computes; everything else,
        # such as an output head that is read and not called, stays in the root's
        in_parts: set[nn.Module] = set()
        for block in blocks:
            is_cut = any(isinstance(each, DTensor) for each in block.parameters())
            mesh = meshes.rows if is_cut else meshes.all
            fully_shard(block, mesh=mesh, mp_policy=_precision(dtype), **options)
            in_parts |= {block} if is_cut else set()
        fully_shard(module, mesh=meshes.all, mp_policy=_precision(dtype), **options)
        self.compute_norm: Callable[[Sequence[Tensor]], Tensor] = (
            nn.utils.get_total_norm if meshes.tensor is None else norm_over_ranks
        )
        """Computes the norm of the gradients of all ranks."""
        self._gathers_once = shard != "weights"
        for each in self._parts():
            assert isinstance(each, nn.Module)
            # FSDP2 averages over the ranks; our losses are divided by counts over all rows already.
            # The ranks of a tensor group compute the same gradients outside of what is cut, and
            # their sum counts them that often. The factor alone asks gloo for PREMUL_SUM, which
            # only NCCL has
            each.set_gradient_divide_factor(1.0 if each in in_parts else float(meshes.tensor_size))
            each.set_force_sum_reduction_for_comms(True)
            each.set_reshard_after_backward(shard == "weights")

    def time_collectives(self, clock: RankClock) -> None:
        """Time the collectives."""
        for part in self._parts():
            clock.time_collectives(part)

    def gather(self) -> None:
        """Gather the weights for all passes until `scatter`; each rank has to call it."""
        if self._gathers_once:
            for part in self._parts():
                part.unshard()

    def scatter(self) -> None:
        """Drop gathered weights.

        While they are gathered, `parameters()` are plain tensors without gradients: clipping them
        gives the norm 0.
        """
        for part in self._parts():
            part.reshard()

    def begin_pass(self, *, is_last: bool) -> None:
        """Prepare for a backward pass: gradients are added over the ranks in the last one only."""
        if self._gathers_once:
            self._root.set_requires_gradient_sync(is_last)
            self._root.set_is_last_backward(is_last)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _parts(self) -> list[FSDPModule]:
        return [each for each in self.module.modules() if isinstance(each, FSDPModule)]


def get_trained_dtype(network: nn.Module) -> torch.dtype:
    """Return the type of the trained parameters. Raises: ConfigError if they have several."""
    found = {each.dtype for each in network.parameters() if each.requires_grad}
    if len(found) != 1:
        raise ConfigError(
            f"the trained parameters have the types {sorted(map(str, found))}, expected one type; "
            "several ranks cannot share them: load the policy with one dtype"
        )
    return found.pop()


def get_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of towers and trunk, each a group of its own for FSDP.

    Everything else, such as an output head that is read and not called, is in the root's group.
    """
    stacks = getattr(network, "block_stacks", None)
    found: Iterable[Iterable[nn.Module]] = stacks() if stacks is not None else _find_stacks(network)
    return [block for stack in found for block in stack]


def _find_stacks(network: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of at least two modules of one class, without lists inside of them."""
    # a policy of one's own need not name its blocks: lists of equal modules are what they look like
    stacks: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in network.modules():
        is_stack = isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
        if is_stack and len(module) > 1 and module not in inside:  # type: ignore[arg-type]
            stacks.append(module)  # type: ignore[arg-type]
            inside.update(module.modules())
    return stacks


def _offload_policy(device: str) -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device == "cuda")  # pages are pinned for copies to a GPU


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in the policy's own type, and add gradients in float32.

    Inputs are not cast: frames are uint8, and masks are bool.
    """
    if dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
