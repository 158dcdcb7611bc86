"""Ranks that fit a machine, and the memory of each: arithmetic, without a process."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Final

import torch
from torch import nn

from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.config import CriticConfig, LearnerConfig
from vla_rl.learner.plan import get_tensor_plan, require_tensor_plan

FLOAT32: Final = 4


@dataclass(frozen=True)
class PolicySize:
    """Numbers of a policy, by what is done with them."""

    num_trained: int
    num_frozen: int
    bytes_each: int
    """Bytes of one number of the type that is computed with."""

    largest_trained: int = 0
    """Numbers of the largest trained tensor, whose gradient is passed on as a whole."""

    largest_block: int = 0
    """Trained numbers of the largest block, which is gathered as a whole if weights are shared."""

    num_cut: int = 0
    """Trained numbers of layers that tensor parallelism cuts."""

    num_cut_frozen: int = 0
    """Frozen numbers of such layers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as an engine holds them."""
        return (self.num_trained + self.num_frozen) * self.bytes_each


@dataclass(frozen=True)
class RankMemory:
    """Bytes that each rank holds, without activations.

    Example:
        The public OpenVLA-OFT 7B, all weights trained, in bfloat16:

        PolicySize(num_trained=7_540_000_000, num_frozen=0, bytes_each=2, ...)
    """

    weights: int
    """Weights that passes compute with."""

    gradients: int
    masters: int
    """Float32 weights that the optimizer updates."""

    moments: int
    """Both moving averages of AdamW."""

    reference: int = 0
    """Weights of the reference policy, if the ranks hold one."""

    critic: int = 0
    """Everything of a critic with a trunk of its own."""

    offloaded: int = 0
    """Bytes in host memory instead: masters, moments and reduced gradients, if they are
    offloaded."""

    @property
    def total(self) -> int:
        """All of it on the rank's device."""
        trained = self.weights + self.gradients + self.masters + self.moments
        return trained + self.reference + self.critic


def measure_network(network: nn.Module) -> PolicySize:
    """Return the size of a network.

    Example:
        A rank of two that share rows alone, of that policy, in GiB: weights 14.0, gradients 28.1, masters 14.0,
        moments 28.1, in all 84.3
    """
    parameters = list(network.parameters())
    trained = [each.numel() for each in parameters if each.requires_grad]
    blocks = (block for stack in get_block_stacks(network) for block in stack)
    return PolicySize(
        num_trained=sum(trained),
        num_frozen=sum(each.numel() for each in parameters if not each.requires_grad),
        bytes_each=max((each.element_size() for each in parameters), default=FLOAT32),
        largest_trained=max(trained, default=0),
        largest_block=max((_num_trained(block) for block in blocks), default=0),
    )


def measure_policy(model: Any, config: LearnerConfig) -> PolicySize:
    """Return the size of a policy whose layers the ranks may share.

    Raises: ConfigError if they have to, and its family has no tensor plan.
    """
    size = measure_network(model.network)
    if config.tensor_parallel == 1:
        return size
    plan = get_tensor_plan(model)
    return replace(
        size,
        num_cut=plan.num_cut(model.network, is_trained=True),
        num_cut_frozen=plan.num_cut(model.network, is_trained=False),
    )


def get_block_stacks(network: nn.Module) -> Sequence[Sequence[nn.Module]]:
    """Return the stacks of blocks that a network names; none if it names none."""
    named: Callable[[], Sequence[Sequence[nn.Module]]] | None = getattr(
        network, "block_stacks", None
    )
    return named() if named is not None else ()


def _num_trained(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def rank_memory(
    size: PolicySize,
    config: LearnerConfig,
    *,
    has_reference: bool = False,
    critic: CriticConfig | None = None,
) -> RankMemory:
    """Return what the largest rank holds at its peak in an update.

    gradients: whole weights, whole gradients in float32, and 1/N of masters and moments.
    weights: 1/N of everything; two gathered blocks come on top, as do activations.
    replicas: everything; 1/`config.tensor_parallel` of masters and moments.

    With tensor parallelism, 1/`config.tensor_parallel` of what is whole of the layers that are cut.
    With `config.offload`, masters, moments and reduced gradients are in host memory.

    Args:
        size: the policy.
        config: number of ranks, and what each holds.
        has_reference: whether the ranks hold a reference policy.
        critic: settings of the critic; None if there is none. A shared trunk needs no memory.
    """
    trained = _trained_memory(size, config)
    reference = size.bytes_each * (
        -(-(size.num_trained + size.num_frozen) // config.ranks)
        if config.shard == "weights"
        else _kept(size.num_trained, size.num_cut, config)
        + _kept(size.num_frozen, size.num_cut_frozen, config)
    )
    has_trunk = critic is not None and critic.trunk == "own"
    return replace(
        trained,
        reference=reference if has_reference else 0,
        critic=trained.total if has_trunk else 0,
        offloaded=trained.offloaded * (2 if has_trunk else 1),
    )


def training_bytes(network: nn.Module) -> int:
    """Return the bytes that one process needs to train a network, besides its weights."""
    size = measure_network(network)
    return rank_memory(size, LearnerConfig()).total - size.weight_bytes


def _trained_memory(size: PolicySize, config: LearnerConfig) -> RankMemory:
    ranks = config.ranks
    whole = _kept(size.num_trained, size.num_cut, config)
    # replicas differ in their rows alone: the ranks of a tensor group share all state
    num_parts = config.tensor_parallel if config.shard == "replicas" else ranks
    shared = -(-size.num_trained // num_parts)
    whole = whole if config.shard != "weights" else shared
    has_masters = size.bytes_each < FLOAT32
    # one process in float32 computes with its masters; all others gather weights in addition
    gathers = config.shard != "weights" and (has_masters or ranks > 1)
    frozen = _kept(size.num_frozen, size.num_cut_frozen, config) * size.bytes_each
    weights = frozen + (whole * size.bytes_each if gathers else 0)
    if config.offload:
        # reduced gradients leave the device block by block; whole ones wait for the last micro-batch
        kept = 0 if config.shard == "weights" else FLOAT32 * whole
        return RankMemory(weights, kept, 0, 0, offloaded=4 * FLOAT32 * shared)
    return RankMemory(
        weights=weights,
        gradients=FLOAT32 * whole,
        masters=FLOAT32 * shared,
        moments=2 * FLOAT32 * shared,
    )


def _kept(numbers: int, cut: int, config: LearnerConfig) -> int:
    """Return the numbers that a rank has of some, a part of which is in layers that are cut."""
    return numbers - cut + -(-cut // config.tensor_parallel)


def require_layout(
    model: TokenModel[Any],
    config: LearnerConfig,
    *,
    has_reference: bool = False,
    critic: CriticConfig | None = None,
    other_bytes: int = 0,
    lost_gpus: Collection[int] = (),
    are_assigned: bool = False,
    gpus: Sequence[tuple[str, int]] = (),
) -> None:
    """Raise ConfigError if the ranks cannot share this policy on their GPUs.

    Arguments are those of `rank_memory`, and besides:

    Args:
        other_bytes: bytes that ranks of other policies hold on each GPU.
        lost_gpus: numbers of the GPUs that no rank may use.
        are_assigned: whether the ranks are not simply on the first GPUs here.
        gpus: if so, the name and the memory of each rank's GPU, if that is known.
    """
    # before a process is started: a class without them would end each rank with an AttributeError
    missing = [name for name in ("save", "load") if not hasattr(type(model), name)]
    if missing:
        raise ConfigError(
            f"LearnerConfig.ranks is {config.ranks}, but {type(model).__name__} lacks "
            f"{' and '.join(missing)}, by which ranks get the policy: add save(folder) and a "
            "classmethod load(folder), or set ranks to 1"
        )
    require_tensor_plan(model, config)
    network = model.network
    types = sorted({str(each.dtype) for each in network.parameters() if each.requires_grad})
    if len(types) != 1:
        raise ConfigError(
            f"the trained parameters have the types {types}, expected one: ranks cannot share them "
            "otherwise; load the policy with one dtype"
        )
    if not gpus and (are_assigned or next(network.parameters()).device.type != "cuda"):
        return
    size = measure_policy(model, config)
    memory = rank_memory(size, config, has_reference=has_reference, critic=critic)
    for name, has in gpus:
        _require_memory(name, has, memory.total, 0, other_bytes)
    if not are_assigned:
        require_gpus(config, gpu_bytes(), size, memory, other_bytes=other_bytes, lost=lost_gpus)


def choose_gpus(num_ranks: int, lost: Collection[int] = ()) -> list[int]:
    """Return the number of the GPU of each rank: the first ones that are not lost."""
    return list(islice((number for number in count() if number not in lost), num_ranks))


def gpu_bytes() -> list[int]:
    """Return the memory of each GPU of this machine."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(index).total_memory for index in range(count)]


def require_gpus(
    config: LearnerConfig,
    gpus: Iterable[int],
    size: PolicySize,
    memory: RankMemory | None = None,
    *,
    other_bytes: int = 0,
    lost: Collection[int] = (),
) -> None:
    """Raise ConfigError unless each rank has a GPU with enough memory.

    Args:
        config: number of ranks, and what each holds.
        gpus: bytes of each GPU.
        size: the policy; the first GPU also holds the weights that act.
        memory: what each rank holds; None for a policy alone.
        other_bytes: bytes that ranks of other policies hold on each GPU.
        lost: numbers of the GPUs that no rank may use.
    """
    found = {number: has for number, has in enumerate(gpus) if number not in lost}
    if config.ranks > len(found):
        raise ConfigError(
            f"LearnerConfig.ranks is {config.ranks}, but there are {len(found)} GPUs; expected at "
            "most one rank for each"
        )
    needed = (memory or rank_memory(size, config)).total
    for number in choose_gpus(config.ranks, lost):
        has = found[number]
        # the engine of the run's own process acts on the first GPU, beside its rank
        acting = size.weight_bytes if number == 0 else 0
        _require_memory(f"GPU {number}", has, needed, acting, other_bytes)


def _require_memory(gpu: str, has: int, needed: int, acting: int, other_bytes: int) -> None:
    if needed + acting + other_bytes <= has:
        return
    others = f" + {other_bytes / 2**30:.1f} for other policies" if other_bytes else ""
    raise ConfigError(
        f"{gpu} has {has / 2**30:.1f} GiB, expected at least {needed / 2**30:.1f} "
        f"for its rank + {acting / 2**30:.1f} for weights that act{others}, besides activations; "
        "take more ranks, --learner.shard weights, --learner.offload, or adapters (--lora-rank)"
    )
