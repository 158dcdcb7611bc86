"""The plan that `--dry-run` prints: the resolved configuration, the processes and their tasks, and
the memory they need.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from vla_rl.cli.gpu_plan import gpu_tables
from vla_rl.env_workers import SimulatorConfig
from vla_rl.evaluation.early_stopping import describe_noise, trend_window
from vla_rl.evaluation.held_out import HeldOutJudge, Judge
from vla_rl.learner import LearnerConfig
from vla_rl.pipelines.config import LearningConfig, MixedTrainingConfig, RunConfig, TrainingConfig
from vla_rl.reporting import MemoryItem, available_bytes, gpu_memory, memory_table
from vla_rl.team.pools import describe_environments
from vla_rl.util.values import plain_console

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

    heard_tokens: int | None = None
    """Conversations only: most tokens of an episode that the policy reads and did not generate. None:
    as many as its context has room for."""

    heard_images: tuple[tuple[int, int], ...] = ()
    """Conversations only: height and width of each image of an episode, in pixels. Its tokens are
    among `heard_tokens`."""


def print_plan(
    config: LearningConfig,
    footprint: EpisodeFootprint,
    weight_bytes: int,
    training_bytes: int,
    console: Console | None = None,
    size: "PolicySize | None" = None,
    judge: Judge | None = None,
    estimate: "RunEstimate | None" = None,
    ranks_here: int | None = None,
) -> None:
    """Print the plan of a run.

    Args:
        config: configuration of the run.
        footprint: memory that its episodes need.
        weight_bytes: size of the policy's weights. A critic is not counted, because its size is
            unknown before it is built.
        training_bytes: further bytes that the learner needs.
        console: console to print on; None for standard output.
        size: numbers of the policy, needed if several ranks share the learner's work.
        judge: what evaluates the policy; its evaluations beside training have a process and
            simulators of their own.
        estimate: memory and arithmetic of the policy's update; None if they are not known.
        ranks_here: learner ranks on this host, if others have some; None: all.
    """
    out = console if console is not None else plain_console()
    ranks = None
    if size is not None:
        # imports torch, which `--help` must not wait for
        from vla_rl.learner.estimates.rank_memory import rank_memory

        ranks = rank_memory(
            size,
            config.learner,
            has_reference=_has_reference(config),
            critic=config.critic if config.advantage.needs_values else None,
        )
    beside = judge if isinstance(judge, HeldOutJudge) and judge.schedule.every is not None else None
    out.print(Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json"))
    out.print(_process_table(config, footprint, ranks, beside))
    out.print(_episodes(config))
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        *_learner_items(config, weight_bytes, training_bytes, ranks, ranks_here),
        *_copies_of_weights(config, weight_bytes),
    ]
    plays_here = not config.cluster.has_hosts or config.cluster.plays_here
    if isinstance(config, TrainingConfig) and plays_here:
        items += _simulator_items(config.simulators, footprint)
    longest = footprint.num_chunks * footprint.chunk_bytes
    num_episodes = _most_outstanding(config)
    items.append(MemoryItem("outstanding episodes, at their longest", longest, num_episodes))
    if beside is not None:
        out.print(_evaluations(config.run.updates, beside))
        items += _evaluator_items(beside, footprint, weight_bytes)
    title = "Memory estimate" + (" of this host" if config.cluster.has_hosts else "")
    out.print(memory_table(title, items, available_bytes()))
    if size is not None and ranks is not None:
        out.print(_rank_table(config.learner, size, ranks))
    if estimate is not None:
        for table in gpu_tables(config, estimate, footprint.num_chunks, footprint.decision_s):
            out.print(table)


def _process_table(
    config: LearningConfig,
    footprint: EpisodeFootprint,
    ranks: "RankMemory | None",
    beside: HeldOutJudge | None,
) -> Table:
    table = Table("process", "count", "what it does", title="Processes")
    threads = config.run.torch_threads
    this = f"event loop, policy and learner ({_device(config.run)}), {threads} threads"
    table.add_row("this one", "1", this)
    if config.engine.kind == "vllm":
        num_engines = str(config.engine.vllm.num_engines)
        table.add_row("vLLM engines", num_engines, "a copy of the policy in each")
    if config.engine.kind == "remote":
        remote = config.engine.remote
        table.add_row("model servers", str(len(remote.urls)), ", ".join(remote.urls))
    if ranks is not None:
        shares = f"a share of each update; shard {config.learner.shard}"
        table.add_row("learner ranks", str(config.learner.ranks), shares)
    num_processes, what = _environments(config, footprint)
    if not config.cluster.has_hosts:
        table.add_row(describe_environments(config), num_processes, what)
    else:
        _add_hosts(table, config, f"{num_processes} processes of {what}; engines")
    if beside is not None:
        table.add_row(
            "held-out evaluator",
            "1",
            f"a checkpoint's policy and {beside.schedule.simulators} simulators of its own, at "
            f"niceness {beside.schedule.niceness}, while one is evaluated",
        )
    return table


def _add_hosts(table: Table, config: LearningConfig, what: str) -> None:
    """Add a row for each host that runs episodes.

    Raises: ConfigError for a list of hosts that is wrong.
    """
    # imported here: a run on one host does without
    from vla_rl.cluster.host_file import read_host_file

    ray = config.cluster.ray
    if ray.address is not None:
        table.add_row("hosts of Ray", str(ray.num_hosts), f"{ray.address}: {what}")
    listed = () if config.cluster.hosts is None else read_host_file(Path(config.cluster.hosts))
    for known in listed:
        table.add_row(f"host {known.listed.name}", "1", f"{known.listed.address}: {what}")
    if config.cluster.plays_here:
        table.add_row("this host", "1", what)


def _most_outstanding(config: LearningConfig) -> int:
    return config.scheduler.group_capacity * config.episodes_per_group


def _episodes(config: LearningConfig) -> str:
    """Return the episodes of the run in words."""
    scheduler, per_group = config.scheduler, config.episodes_per_group
    num_groups = config.run.updates * scheduler.groups_per_update
    return (
        f"{config.run.updates} updates of {scheduler.groups_per_update} groups of {per_group} "
        f"episodes = {num_groups * per_group} episodes; at most {_most_outstanding(config)} "
        f"episodes outstanding at a time, trained at most {scheduler.max_staleness} updates after "
        "their dispatch"
    )


def _learner_items(
    config: LearningConfig,
    weights: int,
    training: int,
    ranks: "RankMemory | None",
    ranks_here: int | None,
) -> list[MemoryItem]:
    if ranks is None:
        return [MemoryItem("weights, gradients and optimizer", weights + training)]
    each = RANK_BYTES + ranks.total + ranks.offloaded
    num_here = config.learner.ranks if ranks_here is None else ranks_here
    acting = MemoryItem("the policy's weights in this process", weights)
    return [acting, MemoryItem("learner ranks", each, num_here)] if num_here else [acting]


def _evaluations(num_updates: int, judge: HeldOutJudge) -> str:
    """Return the evaluations beside training in words."""
    every, report, choose = judge.schedule.every, len(judge.episodes), len(judge.choose)
    assert every is not None
    num = num_updates // every + 1 + (num_updates % every > 0)
    text = (
        f"held out: {report} starts are reported, for weights 0, the best and the last; {choose} "
        f"others choose the best checkpoint: {num} evaluations at most, of weights 0 and of every "
        f"{every} updates beside training, of the last weights after it; at most "
        f"{num * choose + 3 * report} greedy episodes; "
        "up to 4 checkpoints more than run.keep_checkpoints are on disk: the one that is "
        "evaluated, the next one, the best, and that of weights 0 until it is reported"
    )
    if judge.schedule.stop_after is None:
        return text
    patience = judge.schedule.stop_after
    num_needed = trend_window(choose, patience) - 1
    line = f"the run stops early after about {num_needed} evaluations without gain"
    return f"{text}\n{describe_noise(choose, patience) or line}"


def _evaluator_items(
    judge: HeldOutJudge, footprint: EpisodeFootprint, weights: int
) -> list[MemoryItem]:
    return [
        MemoryItem("held-out evaluator: Python, torch and the weights", 700 * MIB + weights),
        MemoryItem("held-out evaluator: the server of its simulators", footprint.server_mb * MIB),
        MemoryItem(
            "held-out evaluator: private memory of each simulator",
            footprint.simulator_mb * MIB,
            judge.schedule.simulators,
        ),
    ]


def _rank_table(config: LearnerConfig, size: "PolicySize", memory: "RankMemory") -> Table:
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


def _copies_of_weights(config: LearningConfig, weights: int) -> list[MemoryItem]:
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
        copies.append(
            MemoryItem("the engine's copy, because an update has several optimizer steps", weights)
        )
    if _has_reference(config) and config.learner.ranks == 1:
        copies.append(MemoryItem("the reference policy of the KL term", weights))
    return copies


def _has_reference(config: LearningConfig) -> bool:
    return config.learner.loss.needs_reference or config.kl_in_reward.coef > 0.0


def _environments(config: LearningConfig, footprint: EpisodeFootprint) -> tuple[str, str]:
    """Return the number of processes, and what runs in them."""
    if not isinstance(config, TrainingConfig):
        return str(config.num_envs), f"{footprint.what_runs}, coroutines of this process"
    in_each = config.simulators.envs_of_processes(config.simulators.num_envs)
    how_many = "one environment" if max(in_each) == 1 else f"up to {max(in_each)} environments"
    beside = (
        f"; {config.text.num_envs} conversations beside them"
        if isinstance(config, MixedTrainingConfig)
        else ""
    )
    return str(len(in_each)), f"{footprint.what_runs}, {how_many} in each{beside}"


def _simulator_items(config: SimulatorConfig, footprint: EpisodeFootprint) -> list[MemoryItem]:
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


def _device(config: RunConfig) -> str:
    if config.device == "cpu":
        return "CPU"
    gpus = gpu_memory()
    return gpus[0].name if gpus else "CPU, because there is no GPU"
