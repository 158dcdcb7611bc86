"""Everything that one rank computes with: its parts of the policy and the critic, and a reference.

policy      trained, sharded
critic      a value head on the policy's features, or on a trunk of its own; sharded like the policy
reference   a frozen copy: whole on every rank, or in shards if weights are
"""

import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.algorithms import Denominators
from vla_rl.engines.device_lane import to_host
from vla_rl.learner.backend import MicroBatchSums, PolicyPasses, on_host
from vla_rl.learner.config import CriticConfig, LearnerConfig
from vla_rl.learner.critic_backend import (
    NETWORK,
    NUM_UPDATES,
    OPTIMIZER,
    ValueModule,
    ValuePasses,
    ValueRows,
    ValueSums,
)
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.distributed.messages import read_observations
from vla_rl.learner.distributed.rank_times import RankClock
from vla_rl.learner.distributed.sharding import (
    Meshes,
    PolicyModule,
    ShardedModule,
    cut_layers,
    get_blocks,
    get_trained_dtype,
)
from vla_rl.learner.distributed.shared_training import SharedTraining
from vla_rl.learner.distributed.state import Part, copy_part
from vla_rl.learner.imitation_backend import Preparation, SftRows, run_sft_backward
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import TensorPlan, get_tensor_plan
from vla_rl.learner.predictions import choose_reference_scores, keep_prefixes
from vla_rl.learner.scoring import score_batch
from vla_rl.types import Observation
from vla_rl.util.arrays import torch_dtype


class PolicySource(msgspec.Struct, frozen=True):
    """The policy that a rank builds before the weights are shared."""

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    dtype: str
    trained: frozenset[str]
    """Names of the parameters that are trained."""

    recomputes: bool
    """Whether activations are recomputed in the backward pass."""

    devices: tuple[str, ...]
    """Device of each rank, by its number."""

    has_reference: bool = False
    """Whether a frozen copy of the policy scores too."""

    critic: CriticConfig | None = None
    """Settings of the critic, if there is one."""

    critic_seed: int = 0

    counts_flops: bool = False
    """Whether the arithmetic of the passes is counted."""

    preparation: Preparation | None = None
    """Preparation of batches of supervised learning; None for the policy's own."""


class RankParts:
    """The networks of one rank. All methods but those that prepare run on the device lane.

    Args:
        source: the policy.
        folder: its files here.
        device: this rank's device.
        config: loss, optimizer, and the number of ranks.
        clock: times the collectives.
    """

    def __init__(
        self,
        source: PolicySource,
        folder: Path,
        device: torch.device,
        config: LearnerConfig,
        clock: RankClock,
    ) -> None:
        self._clock = clock
        self._model = _loaded(source, folder, device)
        network, self._shard, self._offload = self._model.network, config.shard, config.offload
        self._meshes, self._kl = Meshes(config, device.type), config.loss.kl
        self._plan = get_tensor_plan(self._model) if config.tensor_parallel > 1 else None
        names, self._dtype = _inner_names(self._model), get_trained_dtype(network)
        # copies are made before sharding: a sharded network cannot be copied
        value_module = None
        if source.critic is not None:
            value_module = ValueModule(self._model, source.critic, source.critic_seed)
        self._reference = self._frozen_copy() if source.has_reference else None
        module = PolicyModule(self._model)
        self.policy = SharedTraining(
            network, self._sharded(module, network), config.optimizer, names
        )
        self._module, self._passes = module, PolicyPasses(self._model, config, module)
        keep_prefixes(self._model, config)
        self._prepare_sft = _preparing(self._model, source.preparation)
        self._critic: SharedTraining | None = None
        if value_module is not None and source.critic is not None:
            if not value_module.trains_trunk:
                value_module.features = module.features
            self._value_module, own = value_module, value_module.trains_trunk
            sharded = self._sharded(
                value_module, value_module.trunk.network if own else None, [value_module.head]
            )
            self._critic = SharedTraining(value_module.network, sharded, source.critic.optimizer)
            self._value_passes = ValuePasses(value_module, source.critic)

    @property
    def trained_critic(self) -> SharedTraining:
        """This rank's part of the critic."""
        assert self._critic is not None, "these ranks have no critic"
        return self._critic

    def prepare(self, observations: Sequence[Observation]) -> Any:
        """Prepare observations of a message on the host."""
        return self._model.prepare(read_observations(observations))

    def prepare_sft_batch(self, observations: Sequence[Observation], seed: int) -> Any:
        """Prepare the observations of a micro-batch of supervised learning on the host."""
        return self._prepare_sft(read_observations(observations), seed)

    def imitate(
        self, batch: Any, rows: SftRows, seed: int, num_tokens: int, is_last: bool
    ) -> Tensor:
        """Add the gradient of a micro-batch of supervised learning; return its part of the loss."""
        self.policy.sharded.begin_pass(is_last=is_last)
        # a diffusion head draws noise from torch's own state, which all ranks share at their start
        torch.manual_seed(seed)
        loss = run_sft_backward(self._model, self._module.log_probs, batch, rows, num_tokens)
        return loss.cpu()

    def forward_backward(
        self, batch: Any, rows: Decisions, counts: Denominators, compare: int | None, is_last: bool
    ) -> MicroBatchSums:
        """Add the gradient of a micro-batch of the policy."""
        self.policy.sharded.begin_pass(is_last=is_last)
        (sums,), _ = on_host([self._passes.backward(batch, rows, counts, compare)])
        return sums

    def score(self, batch: Any, rows: Decisions, of_reference: bool) -> Tensor:
        """Compute log-probs without a gradient."""
        if not of_reference:
            return score_batch(self._model, self._module.log_probs, batch, rows).cpu()
        assert self._reference is not None, "these ranks have no reference"
        log_probs = choose_reference_scores(self._reference, self._kl)
        return score_batch(self._model, log_probs, batch, rows).cpu()

    def drop_prefixes(self) -> int:
        """Free what the policy keeps of the observations of an update; return its bytes."""
        num_bytes: int = self._model.drop_prefixes()
        return num_bytes

    def gather_critic(self, clear: bool) -> None:
        """Gather the weights that the critic's passes need."""
        self.trained_critic.gather_weights(clear)
        # a head on the policy's features runs through the policy's weights, which have to be
        # gathered for it
        if not self._value_module.trains_trunk:
            self.policy.gather_weights(clear=False)

    def compute_values(self, batch: Any) -> Tensor:
        """Compute values without a gradient."""
        return self._value_passes.compute_values(batch).cpu()

    def fit(
        self, batch: Any, rows: ValueRows, num_rows: int, is_masked: bool, is_last: bool
    ) -> ValueSums:
        """Add the gradient of a micro-batch of the critic."""
        self.trained_critic.sharded.begin_pass(is_last=is_last)
        sums = self._value_passes.backward(batch, rows, num_rows, is_masked=is_masked)
        return ValueSums(*to_host(*sums))

    def scatter_critic(self) -> None:
        """Drop the weights that the critic's passes gathered."""
        self.trained_critic.sharded.scatter()
        self.policy.sharded.scatter()

    def optim_step_critic(self) -> StepReport:
        """Take one optimizer step of the critic."""
        self.policy.sharded.scatter()
        return self.trained_critic.optim_step()

    def copied(self, is_first: bool) -> dict[str, dict[str, Part]]:
        """Copy this rank's part of the policy's two files."""
        return {
            "policy": self.policy.copied_network(is_first=is_first),
            "optimizer": self.policy.copied_optimizer(is_first=is_first),
        }

    def copied_critic(self, is_first: bool, num_updates: int) -> dict[str, dict[str, Part]]:
        """Copy this rank's part of the critic's file."""
        critic = self.trained_critic
        found = {NETWORK: critic.copied_network(is_first=is_first)}
        found[OPTIMIZER] = critic.copied_optimizer(is_first=is_first)
        parts = {
            f"{prefix}{name}": part for prefix, of in found.items() for name, part in of.items()
        }
        parts[NUM_UPDATES] = copy_part(torch.tensor(num_updates), None, is_first_rank=is_first)
        return {"critic": parts}

    def _sharded(
        self, module: nn.Module, network: nn.Module | None, exact: Sequence[nn.Module] = ()
    ) -> ShardedModule:
        sharded = ShardedModule(
            module,
            self._meshes,
            self._shard,
            blocks=() if network is None else get_blocks(network),
            cut_by=None if network is None else self._layers_to_cut(network),
            dtype=self._dtype,
            exact=exact,
            offload=self._offload,
        )
        sharded.time_collectives(self._clock)
        return sharded

    def _layers_to_cut(self, network: nn.Module) -> tuple[nn.Module, TensorPlan] | None:
        return None if self._plan is None else (network, self._plan)

    def _frozen_copy(self) -> PolicyModule:
        """Return a frozen copy of the policy; it is in shards if weights are."""
        frozen = self._model.copy()
        frozen.network.requires_grad_(False)
        module = PolicyModule(frozen)
        # a frozen copy that is whole would undo what sharding saves: 14 GiB on each rank for a 7B
        if self._shard == "weights":
            ShardedModule(
                module,
                self._meshes,
                self._shard,
                blocks=get_blocks(frozen.network),
                cut_by=self._layers_to_cut(frozen.network),
                dtype=self._dtype,
                shares_frozen=True,
            ).time_collectives(self._clock)
        elif self._plan is not None and self._meshes.tensor is not None:
            cut_layers(frozen.network, self._plan, self._meshes.tensor)
        return module


def _loaded(source: PolicySource, folder: Path, device: torch.device) -> Any:
    model = pkgutil.resolve_name(source.policy_class).load(folder)
    dtype = torch_dtype(source.dtype)
    if next(model.network.parameters()).dtype != dtype:
        model.network.to(dtype)
    # saved files do not say what is trained: adapters, or towers that were frozen by the recipe
    for name, parameter in model.network.named_parameters():
        parameter.requires_grad_(name in source.trained)
    if source.recomputes:
        model.recompute_activations()
    model.network.to(device)
    return model


def _preparing(model: Any, preparation: Preparation | None) -> Callable[[Any, int], Any]:
    """Return the function that prepares observations with a seed."""
    if preparation is None:
        return lambda observations, _: model.prepare(observations)
    factory = pkgutil.resolve_name(preparation.factory)
    found: Callable[[Any, int], Any] = factory(model, preparation.settings)
    return found


def _inner_names(model: Any) -> dict[str, str]:
    """Return the network's name of each tensor of a checkpoint.

    Ask before sharding, because a sharded tensor has no address.
    """
    # a checkpoint may name tensors otherwise than the network does, as public ones of OpenVLA-OFT
    # do; the address says which is which
    inner = {
        (tensor.data_ptr(), tuple(tensor.shape)): name
        for name, tensor in reversed(model.network.state_dict().items())
    }
    return {
        name: inner[tensor.data_ptr(), tuple(tensor.shape)]
        for name, tensor in model.checkpoint_tensors().items()
    }
