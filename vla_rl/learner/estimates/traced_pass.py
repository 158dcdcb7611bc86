"""Arithmetic and activations of a policy's passes, found without computing: the policy's own code
runs on fake tensors, which have shapes and no numbers.

    forward, backward ─► torch's counter of floating-point operations, one row
    forward           ─► tensors that autograd keeps: inside of each block, at its input, elsewhere

Everything is proportional to the number of rows, so one row is traced. Nothing is allocated, and
the policy stays as it was: real parameters are looked at, never written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.contract import _get_registry

from vla_rl.engines.policy_model import TokenModel
from vla_rl.learner.estimates.rank_memory import get_block_stacks
from vla_rl.learner.flops import flop_counter

CHECKPOINT: Final = "checkpoint"
"""Name under which recomputation is registered with a module."""

LIVE_GRADIENTS: Final = 3
"""Gradients as large as a block's largest activation that a backward pass holds at a time: in a
gated MLP those of the product and of both its factors."""


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps for the backward pass of one row."""

    inside: tuple[int, ...]
    """Inside of each block."""

    inputs: tuple[int, ...]
    """Input of each block: all that is kept of it if activations are recomputed."""

    outside: int
    """Before, between and after the blocks."""

    largest: int
    """The largest tensor inside of a block."""

    head: int = 0
    """Needed while the backward pass is at the network's head, and not before."""

    def kept(self, *, recomputes: bool) -> int:
        """Return the bytes that wait for the backward pass."""
        return self.outside + sum(self.inputs if recomputes else self.inside)

    def passing(self, *, recomputes: bool) -> int:
        """Return the bytes that one block, or the head, needs during its backward pass, and not
        before.
        """
        recomputed = max(self.inside, default=0) if recomputes else 0
        return max(recomputed + LIVE_GRADIENTS * self.largest, self.head)


@dataclass(frozen=True)
class TracedPass:
    """Costs of one row: arithmetic, and memory for activations."""

    act_flops: int
    """Floating-point operations of a pass that acts."""

    update_flops: int
    """Those of a forward and a backward pass. Recomputation adds one more `act_flops`."""

    kept: Kept

    def of_rows(self, num_rows: int, *, head: int) -> "TracedPass":
        """Return the arithmetic of one row of a batch that was traced, and the memory of the batch.

        Args:
            num_rows: rows of the batch.
            head: bytes that the backward pass of the network's head needs.
        """
        kept = replace(self.kept, head=head)
        return TracedPass(self.act_flops // num_rows, self.update_flops // num_rows, kept)


class AnsweringMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes with shapes, and answers questions for a tensor's content or for its memory, which
    a fake one lacks.

    A second mode for the answers would add a tenth to the time of each operation.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return False
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def fake_tensors(network: nn.Module) -> Iterator[FakeTensorMode]:
    """Compute with shapes alone: what is made inside is fake, and the network's parameters are
    taken for fake ones. If they are, an `AnsweringMode` has made them.

    Example:
        OpenVLA-OFT 7B, all weights trained: TracedPass(act_flops=4.73e12, update_flops=14.2e12, kept=...)
    """
    mode = detect_fake_mode(list(network.parameters())) or AnsweringMode()
    with mode:
        yield mode


@dataclass
class _ActivationRecord:
    """Notes each kept storage once, under the block that runs."""

    counted: set[int]
    inside: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outside: int = 0
    largest: int = 0
    is_in_block: bool = False
    held: list[Tensor] = field(default_factory=list)

    def record_kept(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.counted:
            self.counted.add(storage._cdata)
            # a storage that ended would give its address to the next one
            self.held.append(tensor)
            num_bytes = storage.nbytes()
            if self.is_in_block:
                self.inside[-1] += num_bytes
                self.largest = max(self.largest, num_bytes)
            else:
                self.outside += num_bytes
        return tensor

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        self.inputs.append(given.untyped_storage().nbytes())
        self.inside.append(0)
        self.is_in_block = True

    def leave_block(self, *_: Any) -> None:
        self.is_in_block = False

    def compute_kept(self, log_probs: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """Compute log-probs, and note what autograd keeps for their backward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self.record_kept, lambda kept: kept):
            return log_probs()[0]

    @property
    def kept(self) -> Kept:
        return Kept(tuple(self.inside), tuple(self.inputs), self.outside, self.largest)


def trace_pass(model: TokenModel[Any], batch: Any, tokens: Tensor) -> TracedPass:
    """Trace the passes of one row.

    Args:
        model: the policy, on any device.
        batch: one prepared observation.
        tokens: int64 [1, T], any valid ones.

    Blocks that recompute their activations are traced as if they kept them.
    """
    return trace_computation(*_computation(model, batch, tokens))


def trace_kept(model: TokenModel[Any], batch: Any, tokens: Tensor) -> Kept:
    """Trace the memory of one row alone, without its backward pass: half of the time of
    `trace_pass`, for the same `Kept`.
    """
    return kept_by_computation(*_computation(model, batch, tokens))


def _computation(
    model: TokenModel[Any], batch: Any, tokens: Tensor
) -> tuple[nn.Module, Sequence[nn.Module], Callable[[], tuple[Tensor, Tensor]]]:
    blocks = [block for blocks in get_block_stacks(model.network) for block in blocks]

    def log_probs() -> tuple[Tensor, Tensor]:
        return model.log_probs(batch, tokens, torch.ones(len(tokens), device=tokens.device))

    return model.network, blocks, log_probs


def trace_computation(
    network: nn.Module, blocks: Sequence[nn.Module], log_probs: Callable[[], tuple[Tensor, Tensor]]
) -> TracedPass:
    """Trace a computation of log-probs and entropies, and its backward pass.

    Args:
        network: the network that it computes with.
        blocks: blocks of the network whose activations are counted by themselves.
        log_probs: the computation; it runs once, on fake tensors.
    """
    # gradients of what is trained, as an update has them: for adapters a pass costs 9.8 TFLOP
    # instead of 14.2
    trained = [each for each in network.parameters() if each.requires_grad]
    with _recorded(network, blocks, log_probs) as record:
        with flop_counter() as counter:
            found = record.compute_kept(log_probs)
            act_flops = counter.get_total_flops()
            torch.autograd.grad(found.sum(), trained, allow_unused=True)
        update_flops = counter.get_total_flops()
    return TracedPass(act_flops, update_flops, record.kept)


def kept_by_computation(
    network: nn.Module, blocks: Sequence[nn.Module], log_probs: Callable[[], tuple[Tensor, Tensor]]
) -> Kept:
    """Trace the memory of a computation alone; arguments as in `trace_computation`."""
    with _recorded(network, blocks, log_probs) as record:
        record.compute_kept(log_probs)
    return record.kept


@contextmanager
def _recorded(
    network: nn.Module, blocks: Sequence[nn.Module], log_probs: Callable[[], tuple[Tensor, Tensor]]
) -> Iterator[_ActivationRecord]:
    """Compute with fake tensors inside, and note in the record which block runs."""
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors(network))
        # weights are counted elsewhere, and autograd saves them too: what is counted already is not
        # activations
        weights = [*network.parameters(), *network.buffers()]
        fakes = [mode.from_tensor(each) for each in weights]
        record = _ActivationRecord({each.untyped_storage()._cdata for each in (*weights, *fakes)})
        stack.enter_context(_left_unchanged(network))
        stack.enter_context(_without_recomputation(blocks))
        for block in blocks:
            for remove in (
                block.register_forward_pre_hook(record.enter_block, with_kwargs=True),
                block.register_forward_hook(record.leave_block),
            ):
                stack.callback(remove.remove)
        yield record


@contextmanager
def _without_recomputation(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks keep their activations, so that what is kept can be seen."""
    # both sums are needed, with recomputation and without; one trace that keeps everything gives
    # both
    states = [state for block in blocks if (state := _get_recomputation(block)) is not None]
    for state in states:
        state.enable_hook = False
    try:
        yield
    finally:
        for state in states:
            state.enable_hook = True


def _get_recomputation(block: nn.Module) -> Any:
    registered: Any = _get_registry(block)
    return None if not registered or CHECKPOINT not in registered else checkpoint.state(block)


@contextmanager
def _left_unchanged(network: nn.Module) -> Iterator[None]:
    """Undo what a pass notes in the network: fake numbers must not count as a check that passed."""
    # OpenVLA-OFT notes at its first decision that its trunk is not causal; with fake numbers that
    # note would be worth nothing
    before = dict(vars(network))
    try:
        yield
    finally:
        vars(network).clear()
        vars(network).update(before)
