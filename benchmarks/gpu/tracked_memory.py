"""The estimate of an update's memory beside torch's tracker, for shapes that fit no machine at hand.

    meta device ─► parameters exchanged for fake ones ─► two updates under MemTracker ─► the peak
                                                    └─► `estimate_gpu`, which traces one row

The network is built on `meta` because timm calls `.item()` when it is built from fake tensors. The
second update counts: in the first, the optimizer has no state yet. It has two micro-batches, because
gradients of the first are there when the second computes. What a first update or a first micro-batch
leaves behind does not depend on the pass that makes its gradients, so only one pass is computed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from vla_rl.learner import LearnerConfig
from vla_rl.learner.config import OptimizerConfig
from vla_rl.learner.estimates.device import GpuEstimate, estimate_gpu
from vla_rl.learner.estimates.rank_memory import PolicySize, measure_network
from vla_rl.learner.estimates.traced_pass import (
    AnsweringMode,
    Kept,
    TracedPass,
    fake_tensors,
    trace_pass,
)
from vla_rl.learner.optimizer import PolicyOptimizer
from vla_rl.models.example_inputs import (
    ConversationSizes,
    prepare_conversations,
    score_conversations,
    trace_conversations,
)
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny as tiny_language_model
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.models.prismatic.config import (
    TINY_TOKENIZER,
    LlmConfig,
    LoraConfig,
    OpenVlaOftConfig,
    VisionTowerConfig,
)
from vla_rl.models.prismatic.processor import PrismaticBatch

PROMPT: Final = 24
"""Ids of a LIBERO prompt."""

PUBLIC_LAYERS: Final = 32

RUNNING_LAYERS: Final = (23, 26, PUBLIC_LAYERS)
"""Blocks of DINOv2, SigLIP and the trunk that run: the towers' last ones do not."""


def public_shape(
    num_layers: int = PUBLIC_LAYERS,
    *,
    tower_layers: int | None = None,
    lora: LoraConfig | None = None,
) -> OpenVlaOftConfig:
    """Return the configuration of the public OpenVLA-OFT 7B, or of one with fewer layers."""
    shallow = {} if tower_layers is None else {"depth": tower_layers}
    public = OpenVlaOftConfig(
        tokenizer_file=str(TINY_TOKENIZER), action_bounds=unit_bounds(7), lora=lora
    )
    return OpenVlaOftConfig(
        tokenizer_file=public.tokenizer_file,
        action_bounds=public.action_bounds,
        lora=lora,
        llm=LlmConfig(num_layers=num_layers),
        featurizer=VisionTowerConfig(timm_id=public.featurizer.timm_id, overrides=dict(shallow)),
        fused_featurizer=VisionTowerConfig(
            timm_id=public.fused_featurizer.timm_id, overrides=dict(shallow)
        ),
    )


def fake_policy(config: OpenVlaOftConfig, dtype: torch.dtype = torch.bfloat16) -> OpenVlaOft:
    """Build a policy whose parameters have shapes and no numbers, in no time and no memory."""
    network = meta_network(config, dtype)
    _exchange(network)
    return OpenVlaOft(config, network, Tokenizer.from_file(config.tokenizer_file))


def meta_network(
    config: OpenVlaOftConfig, dtype: torch.dtype = torch.bfloat16
) -> OpenVlaOftNetwork:
    """Build a network to be counted: with less work than `fake_policy`, and no pass runs in it."""
    with torch.device("meta"):
        return OpenVlaOftNetwork(config).to(dtype)


def fake_language_model(num_layers: int, **sizes: int) -> CausalLanguageModel:
    """Build a Llama of these sizes in bfloat16, in no time and no memory."""
    known: Any = tiny_language_model(TinyConfig(), ["one two"], seed=0)
    small = known.network.config
    config = type(small)(**{**small.to_dict(), "num_hidden_layers": num_layers, **sizes})
    with torch.device("meta"):
        network = type(known.network)(config).to(torch.bfloat16)
    _exchange(network)
    return CausalLanguageModel(network, known._tokenizer, known.checkpoint_files())


def _exchange(network: nn.Module) -> None:
    """Exchange parameters and buffers of the meta device for fake ones."""
    with AnsweringMode():
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def rows_of(config: OpenVlaOftConfig, num_rows: int) -> tuple[PrismaticBatch, torch.Tensor]:
    """Return a batch and tokens; fake ones inside of `fake_tensors`."""
    size = config.image_size
    images = torch.zeros(num_rows, len(config.cameras), 3, size, size, dtype=torch.uint8)
    prompts = torch.ones(num_rows, PROMPT, dtype=torch.int64)
    lengths = torch.full((num_rows,), PROMPT)
    first = config.llm.vocab_size - config.num_bins
    tokens = torch.full((num_rows, config.num_action_tokens), first)
    return PrismaticBatch(images, prompts, lengths), tokens


class StorageTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's tracker of every storage, without its account by module.

    That account expects gradients at every parameter that a module has; frozen ones have none, and
    bfloat16 ones pass theirs on to their masters.
    """

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...
    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...
    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...
    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...


def tracked_peak(network: nn.Module, log_probs: Callable[[], tuple[Tensor, Tensor]]) -> int:
    """Return the bytes of tensors at the peak of an update, by torch's tracker.

    Args:
        network: of fake tensors; it is trained, in vain.
        log_probs: the computation of a micro-batch; its entropies are let go, as learners do.
    """
    with fake_tensors(network):
        # what a policy makes at its first pass and keeps belongs to no update
        reached = _leaves_of(log_probs()[0])
        tracker = StorageTracker()
        tracker.track_external(network)
        with tracker:
            optimizer = PolicyOptimizer(network, OptimizerConfig())
            trained = [each for each in network.parameters() if each.requires_grad]
            torch.autograd.backward([each.sum() for each in trained])
            optimizer.step()
            torch.autograd.backward([each.sum() for each in reached])
            found = log_probs()[0]
            torch.autograd.backward(found.sum())
            del found
            optimizer.step()
        peaks: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return max(of_device["Total"] for of_device in peaks.values())


def _leaves_of(computed: Tensor) -> list[Tensor]:
    """Return the parameters to which a backward pass from `computed` gives gradients."""
    seen: set[Any] = set()
    ahead: list[Any] = [computed.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


@dataclass(frozen=True)
class Compared:
    """An estimate and what the tracker found."""

    size: PolicySize
    estimate: GpuEstimate
    traced: TracedPass
    tracked: int
    seconds: float

    @property
    def error(self) -> float:
        """Relative error of the estimate; positive if it is too large."""
        return self.estimate.tensors / self.tracked - 1.0


def compare(config: OpenVlaOftConfig, num_rows: int, *, recomputes: bool = False) -> Compared:
    """Estimate and track the update of a policy."""
    began = time.perf_counter()
    model = fake_policy(config)
    with fake_tensors(model.network):
        batch, tokens = rows_of(config, 1)
    traced = trace_pass(model, batch, tokens)
    learner = LearnerConfig(micro_batch=num_rows)
    size = measure_network(model.network)
    estimate = estimate_gpu(size, learner, traced.kept, recomputes=recomputes)
    if recomputes:
        model.recompute_activations()
    with fake_tensors(model.network):
        rows, chosen = rows_of(model.config, num_rows)
        temperatures = torch.ones(num_rows)
    tracked = tracked_peak(model.network, lambda: model.log_probs(rows, chosen, temperatures))
    return Compared(size, estimate, traced, tracked, time.perf_counter() - began)


def compare_conversations(model: CausalLanguageModel, conversations: ConversationSizes) -> Compared:
    """Estimate and track the update of a language policy, made by `fake_language_model`."""
    began = time.perf_counter()
    traced, size = trace_conversations(model, conversations), measure_network(model.network)
    estimate = estimate_conversations(size, traced.kept)
    batch = prepare_conversations(model, conversations)
    tracked = tracked_peak(model.network, lambda: score_conversations(model, conversations, batch))
    return Compared(size, estimate, traced, tracked, time.perf_counter() - began)


def estimate_conversations(size: PolicySize, kept: Kept) -> GpuEstimate:
    """Estimate the update of a language policy from what its conversations keep."""
    return estimate_gpu(size, LearnerConfig(), kept, recomputes=False, rows=1)


def public_kept(
    shallow: Kept, tower_layers: int, running_layers: tuple[int, int, int] = RUNNING_LAYERS
) -> Kept:
    """Return what one row of the public 7B keeps, from that of its widths with few layers.

    Blocks of a stack are alike: all but the first and the last.

    Args:
        shallow: of `public_shape(3, tower_layers=tower_layers)`.
        tower_layers: at least 4, of which the last never runs.
        running_layers: blocks of both towers and of the trunk that run in the deep one.
    """
    inside, inputs = (
        _deepened(blocks, tower_layers - 1, running_layers)
        for blocks in (shallow.inside, shallow.inputs)
    )
    return Kept(inside, inputs, shallow.outside, shallow.largest)


def _deepened(
    blocks: tuple[int, ...], num_tower: int, running_layers: tuple[int, int, int]
) -> tuple[int, ...]:
    stacks = (blocks[:num_tower], blocks[num_tower : 2 * num_tower], blocks[2 * num_tower :])
    deep: tuple[int, ...] = ()
    for (first, middle, *_, last), depth in zip(stacks, running_layers, strict=True):
        deep += (first, *(middle,) * (depth - 2), last)
    return deep


def compare_public(*, is_tiny: bool) -> Compared:
    """Estimate and track the public 7B, or its widths with two layers."""
    return compare(public_shape(2, tower_layers=2), 2) if is_tiny else compare(public_shape(), 1)
