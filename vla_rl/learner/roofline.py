"""Seconds of one update, if nothing took longer than it must: arithmetic at the device's peak,
memory at its bandwidth, simulators at their speed.

    acting        rows x FLOPs of one decision       or     passes of batches x bytes of the weights
    learning      rows x FLOPs, forward, backward    and    the optimizer's pass over all its state
    simulators    decisions x seconds of each        over the cores

Real runs take longer: 40 to 50 % of the peak is good for a 7B. What binds stays the same.
"""

from dataclasses import dataclass
from typing import Final

from vla_rl.learner.flops import DevicePeak
from vla_rl.learner.rank_memory import PolicySize
from vla_rl.learner.traced_pass import TracedPass

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
