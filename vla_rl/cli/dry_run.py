"""The dry run of a training run: the printed plan, then everything that the run would read.

The plan has the resolved configuration, the processes with their tasks, and for several hosts who does
what on which GPU. Then all files are read, and what the run would raise is raised. Each environment is
opened once, in a simulator process that ends again. Nothing is trained, and nothing is written.
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from vla_rl.actors import KeyPair, RemoteHost, Runtime
from vla_rl.cli.memory_plan import (
    MIB,
    EpisodeFootprint,
    evaluator_items,
    gpu_tables,
    has_reference,
    learner_items,
    rank_table,
    simulator_items,
    weight_copies,
)
from vla_rl.cluster import Gpu, Host, HostResources, Needs, format_layout
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.host_file import LOCAL_HOST, read_host_file
from vla_rl.cluster.hosts import get_own_resources, list_own_gpus
from vla_rl.cluster.layout import Layout
from vla_rl.cluster.listed_hosts import ListedHosts
from vla_rl.cluster.run_layout import parse_learners, plan_run_layout
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.text import is_text_task, make_text_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.held_out_schedule import describe_noise, trend_window
from vla_rl.pipelines.config import LearningConfig, MixedTrainingConfig, RunConfig, TrainingConfig
from vla_rl.reporting import MemoryItem, available_bytes, gpu_memory, memory_table
from vla_rl.reporting.metrics import import_wandb
from vla_rl.reporting.run_directory import RunDirectory, require_writable
from vla_rl.rollout import TaskStart
from vla_rl.team.pools import describe_environments
from vla_rl.types import Agent, EnvSpec, EpisodeSpec
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    from vla_rl.learner.estimates.rank_memory import PolicySize, RankMemory
    from vla_rl.run.estimates import RunEstimate
    from vla_rl.team.members import Team, Trainable


def print_plan(
    config: LearningConfig,
    footprint: EpisodeFootprint,
    weight_bytes: int,
    training_bytes: int,
    console: Console | None = None,
    size: "PolicySize | None" = None,
    evaluator: HeldOutEvaluator | None = None,
    estimate: "RunEstimate | None" = None,
    num_local_ranks: int | None = None,
    others: Mapping[str, int] = MappingProxyType({}),
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
        evaluator: what evaluates the policy; its evaluations in the background have a process and
            simulators of their own.
        estimate: memory and arithmetic of the policy's update; None if they are not known.
        num_local_ranks: learner ranks on this host, if others have some; None: all.
        others: further bytes of this process, by what they are for.
    """
    out = console if console is not None else plain_console()
    ranks = None if size is None else _estimate_ranks(config, size)
    background = (
        evaluator if evaluator is not None and evaluator.schedule.every is not None else None
    )
    out.print(Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json"))
    out.print(_process_table(config, footprint, ranks, background))
    out.print(_describe_episodes(config))
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        *learner_items(config, weight_bytes, training_bytes, ranks, num_local_ranks),
        *weight_copies(config, weight_bytes),
        *(MemoryItem(name, num_bytes) for name, num_bytes in others.items()),
    ]
    if estimate is not None and config.learner.ranks == 1 and _own_gpu(config.run) is None:
        passes = "activations of an update, at their longest (--learner.micro-batch)"
        items.append(MemoryItem(passes, estimate.bytes_of_passes))
    runs_locally = not config.cluster.has_hosts or config.cluster.local_rollout
    if isinstance(config, TrainingConfig) and runs_locally:
        items += simulator_items(config.simulators, footprint)
    longest = footprint.num_chunks * footprint.chunk_bytes
    num_episodes = _most_outstanding(config)
    items.append(MemoryItem("outstanding episodes, at their longest", longest, num_episodes))
    if background is not None:
        out.print(_describe_evaluations(config.run.updates, background))
        items += evaluator_items(background, footprint, weight_bytes)
    title = "Memory estimate" + (" of this host" if config.cluster.has_hosts else "")
    out.print(memory_table(title, items, available_bytes()))
    if size is not None and ranks is not None:
        out.print(rank_table(config.learner, size, ranks))
    if estimate is not None:
        for table in gpu_tables(config, estimate, footprint.num_chunks, footprint.decision_s):
            out.print(table)


def _estimate_ranks(config: LearningConfig, size: "PolicySize") -> "RankMemory":
    # imports torch, which `--help` must not wait for
    from vla_rl.learner.estimates.rank_memory import rank_memory

    return rank_memory(
        size,
        config.learner,
        has_reference=has_reference(config),
        critic=config.critic if config.advantage.needs_values else None,
    )


def _process_table(
    config: LearningConfig,
    footprint: EpisodeFootprint,
    ranks: "RankMemory | None",
    background: HeldOutEvaluator | None,
) -> Table:
    table = Table("process", "count", "what it does", title="Processes")
    threads = config.run.torch_threads
    this = f"event loop, policy and learner ({_device_name(config.run)}), {threads} threads"
    table.add_row("this one", "1", this)
    if config.engine.kind == "vllm":
        num_engines = str(config.engine.vllm.num_engines)
        table.add_row("vLLM engines", num_engines, "a copy of the policy in each")
    if config.engine.kind == "server":
        servers = config.engine.server
        table.add_row("model servers", str(len(servers.urls)), ", ".join(servers.urls))
    if ranks is not None:
        shares = f"a share of each update; shard {config.learner.shard}"
        table.add_row("learner ranks", str(config.learner.ranks), shares)
    num_processes, what = _environment_processes(config, footprint)
    if not config.cluster.has_hosts:
        table.add_row(describe_environments(config), num_processes, what)
    else:
        _add_hosts(table, config, f"{num_processes} processes of {what}; engines")
    if background is not None:
        table.add_row(
            "held-out evaluator",
            "1",
            f"a checkpoint's policy and {background.schedule.simulators} simulators of its own, at "
            f"niceness {background.schedule.niceness}, while one is evaluated",
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
    if config.cluster.local_rollout:
        table.add_row("this host", "1", what)


def _most_outstanding(config: LearningConfig) -> int:
    return config.scheduler.group_capacity * config.episodes_per_group


def _describe_episodes(config: LearningConfig) -> str:
    """Return a description of the run's episodes."""
    scheduler, per_group = config.scheduler, config.episodes_per_group
    num_groups = config.run.updates * scheduler.groups_per_update
    return (
        f"{config.run.updates} updates of {scheduler.groups_per_update} groups of {per_group} "
        f"episodes = {num_groups * per_group} episodes; at most {_most_outstanding(config)} "
        f"episodes outstanding at a time, trained at most {scheduler.max_staleness} updates after "
        "their dispatch"
    )


def _describe_evaluations(num_updates: int, evaluator: HeldOutEvaluator) -> str:
    """Return a description of the evaluations during training."""
    every, report, choose = evaluator.schedule.every, len(evaluator.episodes), len(evaluator.choose)
    assert every is not None
    num = num_updates // every + 1 + (num_updates % every > 0)
    text = (
        f"held out: {report} starts are reported, for weights 0, the best and the last; {choose} "
        f"others choose the best checkpoint: {num} evaluations at most, of weights 0 and of every "
        f"{every} updates during training, of the last weights after it; at most "
        f"{num * choose + 3 * report} greedy episodes; "
        "up to 4 checkpoints more than run.keep_checkpoints are on disk: the one that is "
        "evaluated, the next one, the best, and that of weights 0 until it is reported"
    )
    if evaluator.schedule.stop_after is None:
        return text
    patience = evaluator.schedule.stop_after
    num_needed = trend_window(choose, patience) - 1
    line = f"the run stops early after about {num_needed} evaluations without gain"
    return f"{text}\n{describe_noise(choose, patience) or line}"


def _environment_processes(config: LearningConfig, footprint: EpisodeFootprint) -> tuple[str, str]:
    """Return the number of processes, and what runs in them."""
    if not isinstance(config, TrainingConfig):
        return str(config.num_envs), f"{footprint.what_runs}, coroutines of this process"
    in_each = config.simulators.split_envs(config.simulators.num_envs)
    how_many = "one environment" if max(in_each) == 1 else f"up to {max(in_each)} environments"
    conversations = (
        f"; {config.text.num_envs} conversations besides"
        if isinstance(config, MixedTrainingConfig)
        else ""
    )
    return str(len(in_each)), f"{footprint.what_runs}, {how_many} in each{conversations}"


def _own_gpu(config: RunConfig) -> str | None:
    gpus = [] if config.device == "cpu" else gpu_memory()
    return gpus[0].name if gpus else None


def _device_name(config: RunConfig) -> str:
    no_gpu = "CPU" if config.device == "cpu" else "CPU, because there is no GPU"
    return _own_gpu(config) or no_gpu


ANSWER_WITHIN_S: Final = 5.0
"""Time in which hosts must answer a dry run; then it takes what the file declares."""


async def plan_layout(
    config: LearningConfig, footprint: EpisodeFootprint, team: "Team"
) -> tuple[Layout, str]:
    """Return the layout, and as a table.

    Args:
        config: configuration of a run with other hosts.
        footprint: memory that its episodes need.
        team: the policies, whose weights each host holds.

    Raises: ConfigError with the inequality if the run cannot be placed.
    """
    # torch takes 2 s to import: the help of recipes that open environments must not wait
    from vla_rl.remote_rollout.host_recipe import run_shape

    this_host = Host(name="this host", resources=replace(get_own_resources(), gpus=list_own_gpus()))
    others, remark = await _other_hosts(config.cluster)
    needs = Needs(acting_bytes=team.memory_bytes[0], simulator_bytes=footprint.simulator_mb * MIB)
    layout = plan_run_layout([this_host, *others], run_shape(config, team), needs)
    num_envs = sum(each.num_simulators for each in layout.simulators)
    config.scheduler.require_feasible(num_envs=num_envs, group_size=config.episodes_per_group)
    return layout, format_layout(layout) + remark


async def _other_hosts(config: ClusterConfig) -> tuple[list[Host], str]:
    """Return the other hosts, and a remark if they are not as they say themselves."""
    if config.hosts is None:
        return _ray_hosts(config), "\nas reserved; the cluster itself is asked when the run starts"
    path = Path(config.hosts)
    try:
        async with ListedHosts(path, answer_within_s=ANSWER_WITHIN_S) as listed:
            return [host for host in listed.hosts() if host.placement is not None], ""
    except ConfigError as error:
        remark = f"\nnot every host answered, so this is what {path} declares:\n{error}"
        return _declared_hosts(path), remark


def _ray_hosts(cluster: ClusterConfig) -> list[Host]:
    """Return the nodes that are reserved; of their names, those that learn are known."""
    config = cluster.ray
    named = [part.host for part in parse_learners(cluster.learners) if part.host != LOCAL_HOST]
    names = [*named, *(f"node {number}" for number in range(config.num_hosts))]
    gpus = tuple(Gpu(name="a GPU", memory_bytes=sys.maxsize) for _ in range(config.gpus_per_host))
    resources = HostResources(num_cores=config.cores_per_host, memory_bytes=sys.maxsize, gpus=gpus)
    # a layout reads names and sizes; nothing connects to these hosts
    nobody = KeyPair(public="", secret="")
    placement = RemoteHost(address="tcp://", server_public_key="", client_keys=nobody)
    return [
        Host(name=name, resources=resources, placement=placement)
        for name in names[: config.num_hosts]
    ]


def _declared_hosts(path: Path) -> list[Host]:
    """Return the hosts as the file alone knows them; what it leaves out counts as enough."""
    unknown = HostResources(num_cores=1, memory_bytes=sys.maxsize)
    return [
        Host(
            name=known.listed.name,
            resources=known.listed.get_declared(unknown),
            placement=known.placement,
        )
        for known in read_host_file(path)
    ]


async def rehearse_training(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    model: "Trainable",
    *,
    agent: Agent | None = None,
    evaluator: HeldOutEvaluator | None = None,
    resume: Path | None = None,
    resume_from: str | None = None,
    opened: Sequence[EnvSpec] | None = None,
) -> None:
    """Read everything that `train` would read.

    Args: as of `train`; `opened`, environments to open once instead of each of the starts'.

    Raises: what `train` would raise before its first update.
    """
    # torch takes 2 s to import: the help of recipes that open environments must not wait
    from vla_rl.run.recording import check_recording
    from vla_rl.run.resuming import checkpoint_to_resume, verify_resumable
    from vla_rl.run.train import TrainingRun, default_agent

    envs = distinct_envs(start.env for start in starts)
    if config.run.wandb_project is not None:
        await asyncio.to_thread(import_wandb, config.run.wandb_project)
    await asyncio.to_thread(check_recording, config.run.record_to, envs)
    first_update = 0
    if resume is None:
        require_writable(Path(config.run.root))
    else:
        run = RunDirectory.existing(resume)
        require_writable(resume)
        found = await checkpoint_to_resume(run, resume_from, verify_resumable)
        first_update = 0 if found is None else found[1]
        if evaluator is not None:
            evaluator.check_records(run)
    acting = agent or default_agent(config)
    TrainingRun(config, starts, model, agent=acting, evaluator=evaluator, first_update=first_update)
    # A recipe with a pool of its own has opened it before; its ids say nothing to the built-in pools.
    if type(config).make_own_pool is LearningConfig.make_own_pool:
        simulators = config.simulators if isinstance(config, TrainingConfig) else SimulatorConfig()
        await open_each(envs if opened is None else opened, simulators)


async def open_each(envs: Sequence[EnvSpec], config: SimulatorConfig) -> None:
    """Open every environment once, as a run would.

    Raises: EnvError, ConfigError if one cannot be opened.
    """
    simulated = [env for env in envs if not is_text_task(env)]
    for env in envs:
        if is_text_task(env):
            make_text_task(env)
    if not simulated:
        return
    print(
        f"opening {len(simulated)} environments once, to check that they can be opened", flush=True
    )
    # one after the other, so that a dry run takes the memory of one simulator, and what fails is
    # named
    alone = msgspec.structs.replace(config, num_envs=1)
    async with (
        Runtime("dry run") as runtime,
        SimulatorPool(runtime, alone, specs=simulated) as pool,
    ):
        for number, env in enumerate(simulated):
            episode = EpisodeSpec(
                episode_id=number,
                group_id=number,
                member=0,
                env=env,
                task=env.id,
                seed=0,
                policy_seed=0,
            )
            async with pool.lease(episode):
                pass


def distinct_envs(envs: Iterable[EnvSpec]) -> list[EnvSpec]:
    """Return each environment once, in order."""
    # by their bytes, because the arguments of an environment may hold lists, which have no hash
    return list({msgspec.json.encode(env, order="deterministic"): env for env in envs}.values())
