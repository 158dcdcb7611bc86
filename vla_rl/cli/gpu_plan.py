"""The GPU part of the plan: what the update needs at its peak, on which GPUs it fits, and how long an
update takes at least.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from rich.table import Table

from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import gpu_memory

if TYPE_CHECKING:
    from vla_rl.run.estimates import RunEstimate

GIB: Final = 2**30

USUAL: Final = (
    ("a GPU of 40 GB", 40 * 10**9),
    ("a GPU of 80 GB", 80 * 10**9),
    ("a GPU of 141 GB", 141 * 10**9),
)
"""GPUs that are compared if this machine has none."""

REFERENCE: Final = "NVIDIA H100 80GB HBM3"
"""Device of the estimate of seconds if this machine has no known one."""


def gpu_tables(
    config: LearningConfig, estimate: "RunEstimate", num_chunks: int, decision_s: float | None
) -> Iterable[Table]:
    """Return the tables of memory and of seconds.

    Args:
        config: configuration of the run.
        estimate: memory and arithmetic of its update.
        num_chunks: decisions in the longest episode.
        decision_s: seconds of one core that a simulator takes for one decision; None if unknown.
    """
    gpus = [] if config.run.device == "cpu" else gpu_memory()
    yield _memory(config, estimate, [(gpu.name, gpu.total_bytes) for gpu in gpus] or USUAL)
    name = gpus[0].name if gpus else REFERENCE
    seconds = _seconds(config, estimate, name, num_chunks, decision_s)
    if seconds is not None:
        yield seconds


def _memory(
    config: LearningConfig, estimate: "RunEstimate", gpus: Iterable[tuple[str, int]]
) -> Table:
    memory, size = estimate.memory, estimate.size
    how = "recomputed" if estimate.recomputes else "kept"
    rows = f"{config.learner.micro_batch} rows"
    if estimate.talks is not None:
        rows = f"{estimate.talks.rows} conversations of {estimate.talks.length} tokens"
        num_images = len(estimate.talks.images)
        rows += f" with {num_images} image{'s' * (num_images > 1)}" if num_images else ""
    title = f"GPU memory at the peak of an update, {rows} at a time"
    table = Table("what", "GiB", title=title, show_footer=True)
    table.columns[1].justify = "right"
    for name, num_bytes in memory.terms.items():
        told = f"{name}, {how}" if name == "activations" else name
        table.add_row(told, f"{num_bytes / GIB:.3f}")
    table.add_row("(of trained, frozen numbers)", f"{size.num_trained:,}, {size.num_frozen:,}")
    verdicts = [
        f"{'fits' if memory.total <= has else 'DOES NOT FIT'} {name} ({has / GIB:.1f} GiB)"
        for name, has in gpus
    ]
    table.columns[0].footer = "in all; " + "; ".join(verdicts)
    table.columns[1].footer = f"{memory.total / GIB:.2f}"
    return table


def _seconds(
    config: LearningConfig,
    estimate: "RunEstimate",
    name: str,
    num_chunks: int,
    decision_s: float | None,
) -> Table | None:
    # imports torch, which `--help` must not wait for
    from vla_rl.learner.estimates.device import update_flops
    from vla_rl.run.estimates import peak_of_run, seconds_of_update

    peak = peak_of_run(config.run, name)
    if peak is None:
        return None
    least = seconds_of_update(config, estimate, peak, num_chunks=num_chunks, decision_s=decision_s)
    learning = update_flops(estimate.traced, recomputes=estimate.recomputes)
    told = f"{name}, {peak.flops / 1e12:.4g} TFLOP/s"
    table = Table("what", "at least", title=f"Seconds of one update on {told}", show_footer=True)
    table.columns[1].justify = "right"
    each = "decision" if estimate.talks is None else "conversation"
    acting = f"acting, {estimate.traced.act_flops / 1e9:.4g} GFLOP a {each}"
    table.add_row(f"{acting}, bound by {least.acting_binds}", f"{least.acting_s:.3f}")
    table.add_row(f"learning, {learning / 1e9:.4g} GFLOP a {each}", f"{least.learning_s:.3f}")
    table.add_row("the optimizer's pass over its state", f"{least.optimizer_s:.3f}")
    simulators = "unknown" if least.simulators_s is None else f"{least.simulators_s:.3f}"
    table.add_row("simulators", simulators)
    table.columns[0].footer = f"an update of the longest episodes; {least.binds} binds"
    table.columns[1].footer = f"{least.seconds:.3f}"
    return table
