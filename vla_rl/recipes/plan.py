"""What `--dry-run` prints: the resolved configuration, which process does what, and how much memory that takes."""

import msgspec
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from vla_rl.engines import EngineConfig
from vla_rl.observe import MemoryItem, available_bytes, gpu_memory, memory_table
from vla_rl.recipes.pools import what_plays
from vla_rl.recipes.training_config import LearningConfig, MixedTrainingConfig, TrainingConfig
from vla_rl.simulation import SimulatorConfig

MIB = 2**20

BYTES_PER_PARAMETER = 4 + 4 + 8
"""Weights, gradients and Adam's two moving averages, in float32; the engine shares the learner's weights."""


ENGINE_BYTES = 600 * MIB
"""Of a vLLM engine process without weights, keys and values."""


class EpisodeFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """What episodes of one kind cost, for the estimate."""

    what_runs: str
    """The environments, in words."""

    simulator_mb: int
    """Memory of its own of one simulator process that was forked."""

    server_mb: int
    """Memory of the server that simulators are forked from; a fresh interpreter holds as much beside `simulator_mb`."""

    chunk_bytes: int
    """Of one recorded decision: images, state and tokens."""

    num_chunks: int
    """Of the longest episode."""


def print_plan(
    config: LearningConfig, footprint: EpisodeFootprint, num_parameters: int, console: Console | None = None
) -> None:
    """Print the plan of a run: `num_parameters` is that of the policy; without a console, on standard output."""
    out = console if console is not None else Console()
    out.print(Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json"))

    processes = Table("process", "count", "what it does", title="Processes")
    processes.add_row(
        "this one", "1", f"event loop, policy and learner ({_device()}), {config.run.torch_threads} threads"
    )
    if config.engine.kind == "vllm":
        processes.add_row("vLLM engines", str(config.engine.vllm.num_engines), "a copy of the policy in each")
    processes.add_row(what_plays(config), *_environments(config, footprint))
    out.print(processes)

    scheduler = config.scheduler
    episodes = scheduler.group_capacity * config.group_size
    out.print(
        f"{config.run.updates} updates of {scheduler.groups_per_update} groups of {config.group_size} episodes = "
        f"{config.run.updates * scheduler.groups_per_update * config.group_size} episodes; at most {episodes} episodes "
        f"outstanding at a time, trained at most {scheduler.max_staleness} updates after their dispatch"
    )
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        MemoryItem("weights, gradients and optimizer", num_parameters * BYTES_PER_PARAMETER),
        *(_engine_items(config.engine, num_parameters)),
        *(_simulator_items(config.simulators, footprint) if isinstance(config, TrainingConfig) else ()),
        MemoryItem("outstanding episodes, at their longest", footprint.num_chunks * footprint.chunk_bytes, episodes),
    ]
    out.print(memory_table("Memory estimate", items, available_bytes()))


def _engine_items(config: EngineConfig, num_parameters: int) -> list[MemoryItem]:
    if config.kind == "torch":
        return []
    each = ENGINE_BYTES + config.vllm.kv_cache_gib * 2**30 + num_parameters * 4
    staged = MemoryItem("weights on their way to engines", 2 * num_parameters * 4)
    return [MemoryItem("vLLM engine processes", each, config.vllm.num_engines), staged]


def _environments(config: LearningConfig, footprint: EpisodeFootprint) -> tuple[str, str]:
    """How many processes, and what is in them."""
    if not isinstance(config, TrainingConfig):
        return str(config.num_envs), f"{footprint.what_runs}, coroutines of this process"
    in_each = config.simulators.envs_of_processes(config.simulators.num_envs)
    how_many = "one environment" if max(in_each) == 1 else f"up to {max(in_each)} environments"
    beside = f"; {config.text.num_envs} conversations beside them" if isinstance(config, MixedTrainingConfig) else ""
    return str(len(in_each)), f"{footprint.what_runs}, {how_many} in each{beside}"


def _simulator_items(config: SimulatorConfig, footprint: EpisodeFootprint) -> list[MemoryItem]:
    if config.start == "fork":
        return [
            MemoryItem("the server that simulators are forked from", footprint.server_mb * MIB),
            MemoryItem("simulator processes, each for itself", footprint.simulator_mb * MIB, config.num_envs),
        ]
    each = (footprint.server_mb + footprint.simulator_mb) * MIB
    return [MemoryItem("simulator processes", each, config.num_envs)]


def _device() -> str:
    gpus = gpu_memory()
    return gpus[0].name if gpus else "CPU, as there is no GPU"
