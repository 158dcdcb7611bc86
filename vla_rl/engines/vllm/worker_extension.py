"""Our code inside vLLM's engine processes: it loads staged weights, and scales greedy logits.

Weights go from memory that the learner staged to vLLM's own layout.

    stage_weights (while it generates)  open the memory, check that it is complete
    start, update, finish (paused)      load; what kernels want packed, layer by layer: repack, copy over the old ones

Everything that can be rejected is rejected in the first step, before any weight changes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.engines.vllm.adapter import (
    LogitsProcessor,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vla_rl.engines.vllm.served import GREEDY_TEMPERATURE
from vla_rl.engines.vllm.staging import MappedWeights, StagedWeights
from vla_rl.errors import CheckpointError


class GreedyTemperature(LogitsProcessor):
    """Divides the logits of greedy requests by their temperature."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False, because vLLM would skip this processor for greedy requests otherwise.

        It is made for them.
        """
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep track of the rows in which requests are."""
        if batch_update is None:
            return
        rows = self._temperatures
        # In this order, as vLLM requires of every processor: a row that was freed may be given away
        # in the same step.
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, *_ in batch_update.added:
            rows.pop(row, None)
            if params.extra_args and GREEDY_TEMPERATURE in params.extra_args:
                rows[row] = params.extra_args[GREEDY_TEMPERATURE]
        for source, target, direction in batch_update.moved:
            there, back = rows.pop(source, None), rows.pop(target, None)
            if there is not None:
                rows[target] = there
            if back is not None and direction.name == "SWAP":
                rows[source] = back

    def apply(self, logits: Tensor) -> Tensor:
        """Divide logits [rows, vocabulary] in place."""
        for row, temperature in self._temperatures.items():
            logits[row] /= temperature
        return logits


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty arguments: the transfer needs no initial handshake."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Version that has to be loaded."""

    version: int


class ModelParts:
    """A model, split by how weights reach it.

    It is split once, because walking its modules takes longer than loading them.

    Attributes:
        packed: children with layers of vLLM, which pack weights for their kernels; they are
            reloaded layer by layer.
        plain: parameters of all other children, such as vision towers, by name; loading writes to
            them directly.
        tied: layers that share their weight with another layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.packed = [
            part
            for part in model.children()
            if any(hasattr(layer, "quant_method") for layer in part.modules())
        ]
        # a packed parameter is in the order of its kernel: a copy into it would scramble the layer
        packed = {id(parameter) for part in self.packed for parameter in part.parameters()}
        self.plain = {
            name: each for name, each in model.named_parameters() if id(each) not in packed
        }
        # By identity: layers that share a weight have one parameter under two names.
        owners: dict[int, list[Any]] = {}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None:
                owners.setdefault(id(weight), []).append(module)
        sharing = [module for modules in owners.values() if len(modules) > 1 for module in modules]
        self.tied = [module for module in sharing if hasattr(module, "quant_method")]


class StagedTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads staged weights into the model of this process.

    Registered with vLLM as the backend `vla_rl`.
    """

    init_info_cls = NoInit
    update_info_cls = UpdateInfo
    staged: MappedWeights | None = None
    layout: tuple[Any, ...] | None = None
    _plain: Sequence[tuple[nn.Parameter, Tensor]] = ()
    _packed: Sequence[tuple[str, Tensor]] = ()

    @cached_property
    def parts(self) -> ModelParts:
        """Parts of the model that weights are loaded into."""
        return ModelParts(self.model)

    def stage(self, staged: StagedWeights) -> MappedWeights:
        """Map a version, and check that its tensors are those of the first version.

        Raises: CheckpointError.
        """
        # Refused while it still generates: with other shapes the engine could neither load nor go
        # back.
        if self.layout is not None and staged.offsets != self.layout:
            raise CheckpointError(
                "the staged weights differ in names, shapes or dtypes from the weights that this "
                "engine started with"
            )
        mapped = MappedWeights(staged)
        self.layout, self.staged = staged.offsets, mapped
        offsets = self.parts.plain
        plain: list[tuple[nn.Parameter, Tensor]] = []
        packed: list[tuple[str, Tensor]] = []
        for name, tensor in mapped.named_tensors():
            destination = offsets.get(name)
            if destination is not None and destination.shape == tensor.shape:
                plain.append((destination, tensor))
            else:
                packed.append((name, tensor))
        self._plain, self._packed = plain, packed
        return mapped

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: the transfer needs no initial handshake."""

    def start_weight_update(self) -> None:
        """Prepare the layers with packed weights to be loaded again.

        Other parameters are written to directly.
        """
        for part in self.parts.packed:
            initialize_layerwise_reload(part)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version.

        Raises: CheckpointError if another version, or none, is staged.
        """
        info = self.parse_update_info(update_info)
        self.receive_weights(info)
        # vLLM's own method asks for an accelerator, which fails in a build for CPUs.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Do the same as `update_weights` without waiting for the device."""
        if self.staged is None or self.staged.version != update_info.version:
            found = "none" if self.staged is None else f"version {self.staged.version}"
            raise CheckpointError(f"{found} is staged, expected version {update_info.version}")
        with torch.no_grad():
            for destination, tensor in self._plain:
                destination.copy_(tensor)
        self.model.load_weights(self._packed)

    def finish_weight_update(self) -> None:
        """Repack the loaded weights, and release the memory."""
        for part in self.parts.packed:
            finalize_layerwise_reload(part, self.model_config)
        for head in self.parts.tied:  # loading changes only the embedding, not the packed head
            head.quant_method.process_weights_after_loading(head)
        assert self.staged is not None
        self.model.weight_version = self.staged.version
        self.shutdown()

    def shutdown(self) -> None:
        """Release the memory."""
        self._plain = self._packed = ()
        self.staged = None


class WorkerExtension:
    """Methods of every worker of an engine in addition to vLLM's own.

    Called through `collective_rpc`.
    """

    weight_transfer_engine: StagedTransfer
    parallel_config: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def stage_weights(self, staged: bytes, verify: bool) -> int:
        """Check and map a version, `StagedWeights` as msgpack.

        Return the CRC-32 that this process sees, if `verify` is set.
        """
        mapped = self.weight_transfer_engine.stage(
            msgspec.msgpack.decode(staged, type=StagedWeights)
        )
        return mapped.checksum() if verify else 0

    def apply_weights(self, version: int) -> None:
        """Load the staged version in one call, because nothing may be computed between its
        steps.
        """
        # vLLM offers these as three calls, between which its scheduler could run a step
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()

    def process_id(self) -> int:
        """Return the id of the process with which the engine dies."""
        # workers that share the layers are children of the engine's process
        return os.getppid() if self.parallel_config.world_size > 1 else os.getpid()
