"""Efficiency at 8, 64 and 512 GPUs: the real scheduler, layout and dealing in simulated time.

GPUs and simulators only take time (`benchmarks.hosts.measured`); who runs which episode when, which
GPU learns which row, and who does what on which host is decided by the code of a real run.
Efficiency is the time that the arithmetic alone takes on all GPUs, over the time that updates take.
`python -m benchmarks.hosts.simulate`; the last line is JSON: `efficiency_8`, `efficiency_64`,
`efficiency_512` (goal 0.95), and `control_share_512`, the share of a core that the control process
computes.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from benchmarks.hosts import measured
from benchmarks.hosts.simulated_host import SimulatedHost
from benchmarks.hosts.simulated_hosts import SimulatedHosts
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.cluster import (
    EngineDevices,
    Gpu,
    Host,
    HostResources,
    HostSimulators,
    Layout,
    RankDevice,
)
from vla_rl.cluster.layout import shares
from vla_rl.learner.config import MicroBatchSize
from vla_rl.learner.plan import plan_passes
from vla_rl.rollout import (
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
)
from vla_rl.types import EnvSpec
from vla_rl.util.tasks import run_in_simulated_time

KEYS = ("efficiency_8", "efficiency_64", "efficiency_512")
WARM_UP, MEASURED = 1, 2
"""Updates before the measurement begins, and measured ones."""

SIZE = MicroBatchSize(rows=measured.MICRO_BATCH, tokens=None)


class Simulated(NamedTuple):
    """Figures of one simulation."""

    efficiency: float
    update_s: float
    """Simulated seconds of an update."""

    control_s: float
    """CPU seconds of the control process for an update: scheduler, dealing, and asyncio itself."""

    dealing_s: float
    """Those of them for dealing rows to ranks, for which the GPUs wait; `update_s` has them."""


def simulate(
    num_gpus: int, num_learning: int | None = None, *, max_staleness: int = 1
) -> Simulated:
    """Simulate some updates on `num_gpus` GPUs, of which some only learn; None: each learns and acts."""
    SimulatedHost.own_cost_s = 0.0
    hosts, num_slots = hosts_with(num_gpus), measured.EPISODES_PER_GPU * num_gpus
    layout = make_layout(hosts, num_slots, num_learning)
    return run_in_simulated_time(_updates(layout, hosts, max_staleness))


def hosts_with(num_gpus: int) -> list[Host]:
    """Return hosts with eight GPUs each."""
    count = min(num_gpus, measured.GPUS_PER_HOST)
    resources = HostResources(
        num_cores=measured.CORES_PER_GPU * count,
        memory_bytes=measured.HOST_BYTES,
        gpus=(Gpu(name="H100", memory_bytes=measured.GPU_BYTES),) * count,
    )
    return [Host(name=f"node{number}", resources=resources) for number in range(num_gpus // count)]


def make_layout(hosts: Sequence[Host], num_simulators: int, num_learning: int | None) -> Layout:
    """Return who does what: the first `num_learning` GPUs learn, the others act; None: all do both."""
    gpus = [(host.name, gpu) for host in hosts for gpu in range(len(host.resources.gpus))]
    learning, acting = gpus[:num_learning], gpus[num_learning or 0 :]
    # cores beside GPUs that only learn have no simulators: with all of them, 6 acting GPUs of one host
    # got as many episodes as 8 of the next, and 64 GPUs of which 50 learn an efficiency of 0.82, not 0.99
    num_acting = {host.name: sum(name == host.name for name, _ in acting) for host in hosts}
    names = [name for name, count in num_acting.items() if count]
    counts = shares([Fraction(num_acting[name]) for name in names], num_simulators)
    return Layout(
        mode="both" if num_learning is None else "apart",
        hosts=tuple(host.name for host in hosts),
        ranks=tuple(
            RankDevice(rank=rank, host=host, gpu=gpu) for rank, (host, gpu) in enumerate(learning)
        ),
        engines=tuple(
            EngineDevices(engine=number, host=host, gpus=(gpu,))
            for number, (host, gpu) in enumerate(acting)
        ),
        simulators=tuple(
            HostSimulators(host=name, num_simulators=count)
            for name, count in zip(names, counts, strict=True)
        ),
    )


async def _updates(layout: Layout, machines: list[Host], max_staleness: int) -> Simulated:
    hosts, clock = SimulatedHosts(layout, machines), asyncio.get_running_loop().time
    num_gpus = sum(len(machine.resources.gpus) for machine in machines)
    config = SchedulerConfig(
        groups_per_update=measured.EPISODES_PER_GPU * num_gpus // measured.GROUP_SIZE,
        max_staleness=max_staleness,
    )
    start = TaskStart(env=EnvSpec(id="simulated"), task="simulated")
    source = GroupSource([start], measured.GROUP_SIZE, seed=0)
    work_s, dealing_s, began, cpu_began = 0.0, 0.0, 0.0, 0.0
    engine: Any = hosts  # it has a version, and is asked for nothing else
    runner = LocalEpisodeRunner(hosts, engine, hosts.run_episode)
    async with EpisodeScheduler(runner, source, config) as scheduler:
        for update in range(WARM_UP + MEASURED):
            if update == WARM_UP:
                work_s, dealing_s, began = hosts.work_s(), 0.0, clock()
                cpu_began = time.thread_time() - SimulatedHost.own_cost_s
            groups = [group async for group in scheduler.groups_for_update(update)]
            rows = sum(len(each.steps) for group in groups for each in group.trajectories)
            dealt_at = time.thread_time()
            passes = plan_passes(torch.full((rows,), measured.READ_TOKENS), SIZE, len(layout.ranks))
            spent = time.thread_time() - dealt_at
            await asyncio.sleep(spent)  # nobody learns meanwhile: the one cost that is waited for
            await hosts.learn(passes)
            await asyncio.sleep(measured.STEP_AND_PUBLICATION_S)
            hosts.weight_version = update + 1
            scheduler.mark_trained(groups, update + 1)
            dealing_s += spent
        seconds = clock() - began
        control_s = time.thread_time() - SimulatedHost.own_cost_s - cpu_began
    # of the work in these seconds: some of what is learned from was decided before them
    ideal_s = (hosts.work_s() - work_s) / num_gpus
    return Simulated(
        ideal_s / seconds, seconds / MEASURED, control_s / MEASURED, dealing_s / MEASURED
    )


def main() -> None:
    """Simulate all sizes; print what was assumed and found, and the figures as the last line."""
    found = {num_gpus: simulate(num_gpus) for num_gpus in (8, 64, 512)}
    apart = {num_gpus: simulate(num_gpus, num_learning_gpus(num_gpus)) for num_gpus in (8, 64)}
    synchronous = {num_gpus: simulate(num_gpus, max_staleness=0) for num_gpus in (8, 64)}
    print_table("Assumed: 7B OpenVLA-OFT on LIBERO, H100, hosts of 8 GPUs", assumptions())
    rows = {
        f"together, an update ahead, {gpus} GPUs": _format(each) for gpus, each in found.items()
    }
    rows |= {f"apart, an update ahead, {gpus} GPUs": _format(each) for gpus, each in apart.items()}
    rows |= {
        f"together, synchronous, {gpus} GPUs": _format(each) for gpus, each in synchronous.items()
    }
    print_table("Efficiency against pure arithmetic", rows)
    figures = {f"efficiency_{num_gpus}": each.efficiency for num_gpus, each in found.items()}
    share = found[512].control_s / found[512].update_s
    print_json_line({**figures, "control_share_512": share})


def num_learning_gpus(num_gpus: int) -> int:
    """Return how many GPUs learn in the best split into those that learn and those that act."""
    learn, act = 1 / measured.LEARNED_PER_S, 1 / measured.ACTED_PER_S
    return round(num_gpus * learn / (learn + act))


def assumptions() -> Mapping[str, str]:
    """Return what the simulation takes as given."""
    return {
        "a GPU acts": f"{measured.ACTED_PER_S:g} decisions/s, batches of at most {measured.BATCH}",
        "a GPU learns": f"{measured.LEARNED_PER_S:g} decisions/s, passes of {measured.MICRO_BATCH}",
        "an update": f"{measured.EPISODES_PER_GPU} episodes per GPU in groups of {measured.GROUP_SIZE}",
        "an episode": f"25 decisions on average, at most {measured.MOST_DECISIONS}, drawn one by one",
        "a chunk": f"{1000 * measured.CHUNK_S:g} ms of one core on average, sigma {measured.CHUNK_SIGMA}; "
        f"{measured.CORES_PER_GPU} cores per GPU",
        "step and publication": f"{measured.STEP_AND_PUBLICATION_S} s",
        "dealing rows": "the time it takes here, in which no GPU learns",
        "not simulated": "gradients between GPUs, the network, resets, lost episodes, other tenants",
    }


def _format(found: Simulated) -> str:
    return (
        f"{found.efficiency:.3f}; an update takes {found.update_s:.1f} s, in which the control process "
        f"computes {found.control_s:.2f} s ({found.control_s / found.update_s:.1%} of a core), "
        f"{found.dealing_s:.2f} of them dealing"
    )


if __name__ == "__main__":
    main()
