"""FSDP2 on a policy: which parameters are sharded, in which groups, and how gradients add up.

    gradients   weights whole during an update; masters, moments and reduced gradients in shards
    weights     weights in shards too, gathered block by block in each pass
    replicas    nothing in shards, gradients added over the ranks

Parameters that are not trained keep their type and stay whole on every rank. With tensor
parallelism, blocks with cut layers are sharded over the ranks that have other rows, and everything
else over all ranks (`meshes`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.distributed.cutting import cut
from vla_rl.learner.distributed.gradient_norm import norm_over_ranks
from vla_rl.learner.distributed.meshes import Meshes
from vla_rl.learner.distributed.rank_clock import RankClock
from vla_rl.learner.tensor_plan import TensorPlan

Shard: TypeAlias = Literal["gradients", "weights", "replicas"]


class PolicyModule(nn.Module):
    """A policy's `log_probs` and `features` as forward passes of one module.

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

    def features(self, batch: Any) -> Tensor:
        """Compute the features that a critic reads."""
        (features,) = self("features", batch)
        assert isinstance(features, Tensor)
        return features

    def forward(self, what: str, *inputs: Any) -> tuple[Tensor, ...]:
        """Call a method of the policy."""
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
            cut(*cut_by, meshes.tensor)
        frozen = {each for each in module.parameters() if not each.requires_grad}
        device = next(module.parameters()).device.type
        options: dict[str, Any] = {
            "reshard_after_forward": shard == "weights",
            "ignored_params": set() if shares_frozen else frozen,
            "offload_policy": _offload(device) if offload else OffloadPolicy(),
        }
        for part in exact:
            fully_shard(part, mesh=meshes.all, mp_policy=_precision(torch.float32), **options)
        in_parts: set[nn.Module] = set()
        for block in blocks:
            is_cut = any(isinstance(each, DTensor) for each in block.parameters())
            mesh = meshes.rows if is_cut else meshes.all
            fully_shard(block, mesh=mesh, mp_policy=_precision(dtype), **options)
            in_parts |= {block} if is_cut else set()
        fully_shard(module, mesh=meshes.all, mp_policy=_precision(dtype), **options)
        self.norm_of: Callable[[Sequence[Tensor]], Tensor] = (
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

    def watch(self, clock: RankClock) -> None:
        """Time the collectives."""
        for part in self._parts():
            clock.watch(part)

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


def compute_dtype_of(network: nn.Module) -> torch.dtype:
    """Return the type of the trained parameters. Raises: ConfigError if they have several."""
    found = {each.dtype for each in network.parameters() if each.requires_grad}
    if len(found) != 1:
        raise ConfigError(
            f"the trained parameters have the types {sorted(map(str, found))}, expected one type; "
            "several ranks cannot share them: load the policy with one dtype"
        )
    return found.pop()


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of towers and trunk, each a group of its own for FSDP.

    Everything else, such as an output head that is read and not called, is in the root's group.
    """
    stacks = getattr(network, "block_stacks", None)
    found: Iterable[Iterable[nn.Module]] = stacks() if stacks is not None else _stacks_of(network)
    return [block for stack in found for block in stack]


def _stacks_of(network: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of at least two modules of one class, without lists inside of them."""
    stacks: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in network.modules():
        is_stack = isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
        if is_stack and len(module) > 1 and module not in inside:  # type: ignore[arg-type]
            stacks.append(module)  # type: ignore[arg-type]
            inside.update(module.modules())
    return stacks


def _offload(device: str) -> CPUOffloadPolicy:
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
