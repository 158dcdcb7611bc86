"""The memory that a run needs, as `--dry-run` estimates it: of its processes, of each learner rank, of its GPUs.

The GPUs' part says what the update needs at its peak, on which GPUs it fits, and how long an update
takes at least.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from vla_rl.env_workers import SimulatorConfig
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.learner import LearnerConfig
from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import MemoryItem, gpu_memory

if TYPE_CHECKING:
    from vla_rl.learner.estimates.rank_memory import PolicySize, RankMemory
    from vla_rl.run.estimates import RunEstimate


MIB = 2**20

ENGINE_BYTES = 600 * MIB
"""Memory of a vLLM engine process without weights and KV cache."""


RANK_BYTES = 600 * MIB
"""Memory of a learner rank without its share of the policy: Python, torch and transformers."""


class EpisodeFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that episodes of one kind need, for the estimate."""

    what_runs: str
    """Description of the environments."""

    simulator_mb: int
    """Private memory of one forked simulator process, in MB."""

    server_mb: int
    """Memory of the server that simulators are forked from, in MB. A simulator that is not forked
    needs it too."""

    chunk_bytes: int
    """Bytes of one recorded decision: images, state and tokens."""

    num_chunks: int
    """Decisions in the longest episode."""

    decision_s: float | None = None
    """Seconds of one core that a simulator takes for one decision. None: unknown."""

    observation_tokens: int | None = None
    """Conversations only: most tokens of an episode that the policy reads and did not generate. None:
    as many as its context has room for."""

    observation_images: tuple[tuple[int, int], ...] = ()
    """Conversations only: height and width of each image of an episode, in pixels. Its tokens are
    among `observation_tokens`."""


def learner_items(
    config: LearningConfig,
    weights: int,
    training: int,
    ranks: "RankMemory | None",
    num_local_ranks: int | None,
) -> list[MemoryItem]:
    if ranks is None:
        return [MemoryItem("weights, gradients and optimizer", weights + training)]
    each = RANK_BYTES + ranks.total + ranks.offloaded
    num_local = config.learner.ranks if num_local_ranks is None else num_local_ranks
    acting = MemoryItem("the policy's weights in this process", weights)
    return [acting, MemoryItem("learner ranks", each, num_local)] if num_local else [acting]


def evaluator_items(
    evaluator: HeldOutEvaluator, footprint: EpisodeFootprint, weights: int
) -> list[MemoryItem]:
    return [
        MemoryItem("held-out evaluator: Python, torch and the weights", 700 * MIB + weights),
        MemoryItem("held-out evaluator: the server of its simulators", footprint.server_mb * MIB),
        MemoryItem(
            "held-out evaluator: private memory of each simulator",
            footprint.simulator_mb * MIB,
            evaluator.schedule.simulators,
        ),
    ]


def rank_table(config: LearnerConfig, size: "PolicySize", memory: "RankMemory") -> Table:
    """Return the memory of each learner rank, without activations."""
    parts = {
        "weights that passes compute with": memory.weights,
        "gradients, float32": memory.gradients,
        "masters, float32": memory.masters,
        "both moments of AdamW, float32": memory.moments,
        "the reference policy": memory.reference,
        "the critic and its optimizer": memory.critic,
        "each rank": memory.total,
        "in host memory besides": memory.offloaded,
    }
    # a term that these settings do not have is left out
    needed = {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
    title = f"{config.ranks} ranks, shard {config.shard}"
    if config.tensor_parallel > 1:
        title += f", tensor parallel {config.tensor_parallel}"
    table = Table("in each rank, without activations", "GiB", title=title)
    table.add_row("trained, frozen parameters", f"{size.num_trained:,}, {size.num_frozen:,}")
    if config.tensor_parallel > 1:
        cut = size.num_cut + size.num_cut_frozen
        table.add_row(f"parameters of layers that {config.tensor_parallel} ranks share", f"{cut:,}")
    for name, num_bytes in needed.items():
        table.add_row(name, f"{num_bytes / 2**30:.3f}")
    return table


def weight_copies(config: LearningConfig, weights: int) -> list[MemoryItem]:
    """List the copies of weights besides the learner's: an engine's that cannot share them, and a
    KL term's reference.
    """
    engine, copies = config.engine, []
    if engine.kind == "vllm":
        each = ENGINE_BYTES + engine.vllm.kv_cache_gib * 2**30 + weights
        copies.append(MemoryItem("vLLM engine processes", each, engine.vllm.num_engines))
        copies.append(MemoryItem("weights on their way to engines", 2 * weights))
    elif (
        engine.kind == "torch"
        and not config.learner.steps_once_per_update
        and config.learner.ranks == 1
    ):
        # steps of one update change the weights before they are published; an engine that
        # shared them would act in between
        copies.append(
            MemoryItem("the engine's copy, because an update has several optimizer steps", weights)
        )
    if has_reference(config) and config.learner.ranks == 1:
        copies.append(MemoryItem("the reference policy of the KL term", weights))
    return copies


def has_reference(config: LearningConfig) -> bool:
    return config.learner.loss.needs_reference or config.kl_in_reward.coef > 0.0


def simulator_items(config: SimulatorConfig, footprint: EpisodeFootprint) -> list[MemoryItem]:
    if config.start == "fork":
        return [
            MemoryItem("the server that simulators are forked from", footprint.server_mb * MIB),
            MemoryItem(
                "simulators, private memory of each",
                footprint.simulator_mb * MIB,
                config.num_envs,
            ),
        ]
    each = (footprint.server_mb + footprint.simulator_mb) * MIB
    return [MemoryItem("simulators", each, config.num_envs)]


GIB: Final = 2**30

# makers of GPUs count in powers of ten
USUAL_GPUS: Final = (
    ("a GPU of 40 GB", 40 * 10**9),
    ("a GPU of 80 GB", 80 * 10**9),
    ("a GPU of 141 GB", 141 * 10**9),
)
"""GPUs that are compared if this machine has none."""

REFERENCE_GPU: Final = "NVIDIA H100 80GB HBM3"
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
    yield _memory_table(
        config, estimate, [(gpu.name, gpu.total_bytes) for gpu in gpus] or USUAL_GPUS
    )
    name = gpus[0].name if gpus else REFERENCE_GPU
    seconds = _seconds_table(config, estimate, name, num_chunks, decision_s)
    if seconds is not None:
        yield seconds


def _memory_table(
    config: LearningConfig, estimate: "RunEstimate", gpus: Iterable[tuple[str, int]]
) -> Table:
    memory, size = estimate.memory, estimate.size
    how = "recomputed" if estimate.recomputes else "kept"
    rows = f"{config.learner.micro_batch} rows"
    if estimate.conversations is not None:
        rows = (
            f"{estimate.conversations.rows} conversations of {estimate.conversations.length} tokens"
        )
        num_images = len(estimate.conversations.images)
        rows += f" with {num_images} image{'s' * (num_images > 1)}" if num_images else ""
    title = f"GPU memory at the peak of an update, {rows} at a time"
    table = Table("what", "GiB", title=title, show_footer=True)
    table.columns[1].justify = "right"
    for name, num_bytes in memory.terms.items():
        label = f"{name}, {how}" if name == "activations" else name
        table.add_row(label, f"{num_bytes / GIB:.3f}")
    table.add_row("(of trained, frozen numbers)", f"{size.num_trained:,}, {size.num_frozen:,}")
    verdicts = [
        f"{'fits' if memory.total <= has else 'DOES NOT FIT'} {name} ({has / GIB:.1f} GiB)"
        for name, has in gpus
    ]
    table.columns[0].footer = "in all; " + "; ".join(verdicts)
    table.columns[1].footer = f"{memory.total / GIB:.2f}"
    return table


def _seconds_table(
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
    label = f"{name}, {peak.flops / 1e12:.4g} TFLOP/s"
    table = Table("what", "at least", title=f"Seconds of one update on {label}", show_footer=True)
    table.columns[1].justify = "right"
    each = "decision" if estimate.conversations is None else "conversation"
    acting = f"acting, {estimate.traced.act_flops / 1e9:.4g} GFLOP a {each}"
    table.add_row(f"{acting}, bound by {least.acting_binds}", f"{least.acting_s:.3f}")
    table.add_row(f"learning, {learning / 1e9:.4g} GFLOP a {each}", f"{least.learning_s:.3f}")
    table.add_row("the optimizer's pass over its state", f"{least.optimizer_s:.3f}")
    simulators = "unknown" if least.simulators_s is None else f"{least.simulators_s:.3f}"
    table.add_row("simulators", simulators)
    table.columns[0].footer = f"an update of the longest episodes; {least.binds} binds"
    table.columns[1].footer = f"{least.seconds:.3f}"
    return table
