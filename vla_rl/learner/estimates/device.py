"""Estimates of an update on one device: its memory at the peak, its seconds at least.

Memory is a sum of named terms, compared with what the GPU has:

    state         weights, masters, gradients, moments      of the policy's numbers (`rank_memory`)
    activations   micro-batch x bytes of one row            traced without computing (`traced_pass`)
    overheads     CUDA's context, workspaces, fragments     measured on one H200 (docs/gpu.md)

The gradients of earlier micro-batches are there when the activations of the last one are, so the
peak is their sum. An update of a single micro-batch stays below it.

Seconds are those of an update in which nothing took longer than it must: arithmetic at the device's
peak, memory at its bandwidth, simulators at their speed.

    acting        rows x FLOPs of one decision       or     passes of batches x bytes of the weights
    learning      rows x FLOPs, forward, backward    and    the optimizer's pass over all its state
    simulators    decisions x seconds of each        over the cores

Real runs take longer: 40 to 50 % of the peak is good for a 7B. What binds stays the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.estimates.rank_memory import FLOAT32, PolicySize, rank_memory
from vla_rl.learner.estimates.traced_pass import Kept, TracedPass
from vla_rl.learner.flops import DevicePeak

GIB: Final = 2**30
MIB: Final = 2**20


@dataclass(frozen=True)
class CudaOverheads:
    """Memory of a CUDA process besides its tensors.

    Context and fragments were measured on an H200 with torch 2.11.
    """

    context: int = 770 * MIB
    """Driver, kernels and their code."""

    workspaces: int = 64 * MIB
    """cuBLAS and cuBLASLt: 32 MiB each for a stream."""

    nccl: int = 0
    """Buffers of NCCL, with several ranks."""

    fragments: float = 0.082
    """Share of the tensors' memory that the allocator holds and cannot use: 10.6 of 128.5 GiB when an
    update of all weights ran out of memory. Below that the allocator may hold far more, which it gives
    back when it needs it."""


NCCL_BYTES: Final = 512 * MIB
"""Buffers of NCCL for each rank, if there are several."""


@dataclass(frozen=True)
class GpuEstimate:
    """Bytes of one GPU at the peak of an update."""

    terms: Mapping[str, int]
    """Bytes by the name of what needs them."""

    tensors: int
    """Bytes of tensors alone, as torch's tracker counts them."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.terms.values())

    def inequality(self, available: int) -> str:
        """Write the sum and what it is compared with."""
        # terms that round to 0.0 GiB are left out: ten of them would hide the one that does not fit
        parts = [f"{num_bytes / GIB:.1f} {name}" for name, num_bytes in self.terms.items()]
        sign = "<=" if self.total <= available else ">"
        total = f"{self.total / GIB:.1f} {sign} {available / GIB:.1f} GiB"
        return f"{' + '.join(part for part in parts if not part.startswith('0.0 '))} = {total}"

    def require_fit(self, available: int, *, remedy: str = "") -> None:
        """Raise ConfigError with the inequality if it does not fit.

        Args:
            available: bytes of the GPU.
            remedy: how to need less, if it is not the usual.
        """
        if self.total > available:
            usual = (
                "take a smaller --learner.micro-batch, --recompute-activations, adapters "
                "(--lora-rank), or several GPUs (--learner.ranks)"
            )
            raise ConfigError(
                f"the policy's update needs more memory than the GPU has free: "
                f"{self.inequality(available)}; {remedy or usual}"
            )


def estimate_gpu(
    size: PolicySize,
    config: LearnerConfig,
    kept: Kept,
    *,
    recomputes: bool,
    rows: int | None = None,
    copies: Mapping[str, int] | None = None,
    overheads: CudaOverheads | None = None,
) -> GpuEstimate:
    """Estimate the memory of the GPU that holds the learner, or its first rank.

    Args:
        size: numbers of the policy.
        config: micro-batch, ranks, and what each rank holds.
        kept: activations of one row.
        recomputes: whether activations of blocks are recomputed.
        rows: how often they are kept. None: `config.micro_batch` times.
        copies: other weights on the same GPU: an engine's, a reference's.
        overheads: memory besides tensors. None: typical values.

    Example:
        estimate.inequality(available) -> "14.0 weights + 28.1 gradients + 28.1 masters + 56.2 moments + ... =
        144.6 > 139.8 GiB"
    """
    if overheads is None:
        overheads = CudaOverheads(nccl=NCCL_BYTES if config.ranks > 1 else 0)
    state = rank_memory(size, config)
    rows = config.micro_batch if rows is None else rows
    gathered = 0
    if config.shard == "weights":
        # the block that computes and the one that is fetched ahead; the trunk's are the largest
        whole = -(-size.largest_block // config.tensor_parallel)
        gathered = 2 * whole * size.bytes_each
    # weights in float32 are their own masters
    is_own_master = size.bytes_each == FLOAT32 and config.ranks == 1
    tensors = {
        "weights": state.weights + gathered + (state.masters if is_own_master else 0),
        "gradients": state.gradients,
        "masters": 0 if is_own_master else state.masters,
        "moments": state.moments,
        "activations": rows * kept.kept(recomputes=recomputes),
        # a weight's gradient is whole before it is added to the others: the output head's, when the
        # backward pass begins, and no block is in it
        "backward of a block": max(
            rows * kept.passing(recomputes=recomputes), size.largest_trained * size.bytes_each
        ),
        **(copies or {}),
    }
    sum_of_tensors = sum(tensors.values())
    besides = {
        "CUDA context": overheads.context,
        "workspaces": overheads.workspaces,
        "NCCL": overheads.nccl,
        "fragmentation": round(overheads.fragments * sum_of_tensors),
    }
    return GpuEstimate({**tensors, **besides}, sum_of_tensors)


STATE_PASS_BYTES: Final = 34
"""Bytes that one optimizer step reads and writes for each number: its float32 gradient (norm, clip,
step), both moments and the master, and the rounded weight."""


@dataclass(frozen=True)
class Workload:
    """One update."""

    decisions: int
    """Decisions that are made and learnt from, at most."""

    epochs: int
    steps: int
    """Optimizer steps."""

    acting_rows: int
    """Rows of a batch that acts."""

    recomputes: bool

    passes: int = 1
    """Passes of a batch for one decision: tokens that are generated one after another."""

    ranks: int = 1
    """Devices that share the update."""

    simulator_s: float | None = None
    """Seconds of one core for one decision; None if unknown."""

    cores: int = 1
    """Cores on which simulators run."""

    overlaps: bool = True
    """Whether simulators run while the device computes."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of one update, at least."""

    acting_s: float
    acting_binds: str
    """compute or memory bandwidth."""

    learning_s: float
    optimizer_s: float
    simulators_s: float | None
    seconds: float
    binds: str
    """compute, memory bandwidth, or simulators."""


def update_flops(traced: TracedPass, *, recomputes: bool) -> int:
    """Return the operations of one row's forward and backward pass."""
    return traced.update_flops + (traced.act_flops if recomputes else 0)


def roofline(traced: TracedPass, size: PolicySize, work: Workload, peak: DevicePeak) -> Roofline:
    """Return the seconds of one update on one device (or `work.ranks` of them for learning)."""
    computing = work.decisions * traced.act_flops / peak.flops
    reading = optimizer = 0.0
    if peak.bytes_per_s is not None:
        # each batch reads all weights once: with few episodes, acting is bound by the memory's
        # bandwidth and not by arithmetic
        batches = -(-work.decisions // max(work.acting_rows, 1))
        reading = batches * work.passes * size.weight_bytes / peak.bytes_per_s
        optimizer = work.steps * STATE_PASS_BYTES * size.num_trained / peak.bytes_per_s / work.ranks
    rows = work.decisions * work.epochs
    learning = rows * update_flops(traced, recomputes=work.recomputes) / peak.flops / work.ranks
    acting = max(computing, reading)
    device = acting + learning + optimizer
    simulators = (
        None if work.simulator_s is None else work.decisions * work.simulator_s / max(work.cores, 1)
    )
    known = simulators or 0.0
    seconds = max(device, known) if work.overlaps else device + known
    of_device = {
        "compute": learning + (computing if computing >= reading else 0.0),
        "memory bandwidth": optimizer + (reading if reading > computing else 0.0),
    }
    binds = "simulators" if known > device else max(of_device, key=lambda name: of_device[name])
    return Roofline(
        acting_s=acting,
        acting_binds="compute" if computing >= reading else "memory bandwidth",
        learning_s=learning,
        optimizer_s=optimizer,
        simulators_s=simulators,
        seconds=seconds,
        binds=binds,
    )
