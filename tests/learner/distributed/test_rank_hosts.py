"""Ranks on several hosts learn what one process learns, and end as one."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from small_episodes import mlp, walk

from benchmarks.shared_updates import gradients, relative_difference, saved, settings
from vla_rl.actors import RemoteHost, Runtime, make_keys, read_keys
from vla_rl.actors.host import HostServer
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, RankFailed
from vla_rl.learner import (
    Critic,
    CriticConfig,
    Learner,
    OptimizerConfig,
    TeamState,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.distributed.host_rank import (
    code_report,
    merge_ranges,
    require_same_code,
    split_ranges,
)
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.learner.distributed.rank_times import RankTimes
from vla_rl.learner.distributed.rendezvous import (
    Network,
    Rendezvous,
    RendezvousServer,
    find_interface,
    join_group,
)
from vla_rl.models.mlp import MlpPolicy
from vla_rl.types import SOLE_MEMBER, Trajectory

pytestmark = pytest.mark.asyncio(loop_scope="session")
ADVANTAGES = (1.0, -0.5, 0.25)
LOOPBACK = "127.0.0.1"


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def remote(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RemoteHost]:
    """A host, served at a port of this machine."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    ours, theirs = (read_keys(folder / f"{name}.key") for name in ("client", "server"))
    address = f"tcp://{LOOPBACK}:0"
    async with HostServer(address, theirs, [ours.public], lost_after_s=20.0) as server:
        yield RemoteHost(
            address=server.address,
            server_public_key=theirs.public,
            client_keys=ours,
            lost_after_s=20.0,
        )


def assign_ranks(remote: RemoteHost, num_remote: int) -> RankAssignments:
    """Rank 0 here, and others on the host."""
    remote_rank = RankAssignment("cpu", host="a", placement=remote, address=LOOPBACK)
    return RankAssignments((RankAssignment("cpu", address=LOOPBACK), *[remote_rank] * num_remote))


def episodes(policy: Any) -> list[Trajectory]:
    return [walk(policy, seed, steps) for seed, steps in ((1, 1), (2, 5), (3, 2))]


def apart(found: Any, expected: Any) -> float:
    pairs = [
        torch.cat([each.detach().flatten() for each in policy.network.parameters()])
        for policy in (found, expected)
    ]
    return float((pairs[0] - pairs[1]).norm() / pairs[1].norm())


async def test_ranks_here_and_on_another_host_learn_and_continue_what_one_process_learns(
    remote: RemoteHost, runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    alone, shared = mlp(), mlp()
    trajectories = episodes(alone)
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=0)
    critic_config = CriticConfig(optimizer=optimizer, micro_batch=2)
    one, first = Learner(alone, lane, settings()), Critic(alone, lane, critic_config, seed=3)
    three = ShardedLearner(shared, runtime, lane, settings(ranks=3))
    second = three.critic(critic_config, seed=3)
    three.assign_ranks(assign_ranks(remote, 2))
    async with three:
        placements = [runtime.info(rank).placement for rank in three.ranks.ranks]
        assert [isinstance(rank_host, RemoteHost) for rank_host in placements] == [
            False,
            True,
            True,
        ]
        expected = await gradients(one, trajectories, ADVANTAGES, tmp_path / "one")
        found = await gradients(three, trajectories, ADVANTAGES, tmp_path / "three")
        assert relative_difference(found, expected) <= 3e-6
        assert apart(shared, alone) <= 1e-6  # published here
        for learner in (one, three):
            await learner.update(trajectories, list(ADVANTAGES))
        # each continues from the other's checkpoint
        state = TeamState({SOLE_MEMBER: await three.snapshot()}, await second.snapshot())
        await save_checkpoint(tmp_path / "state", state, {})
        read = (await load_checkpoint(tmp_path / "state" / "update-000002")).state
        await one.restore(read.only)
        await first.restore(read.critic)
        await second.restore(read.critic, read.critic_file)
        await three.restore(await saved(one, tmp_path / "back"))
        values = [await each.values(trajectories) for each in (first, second)]
        for pair in zip(*values, strict=True):
            assert pair[1].values == pytest.approx(pair[0].values, rel=1e-5, abs=1e-6)
        for learner in (one, three):
            await learner.update(trajectories, list(ADVANTAGES))
        assert apart(shared, alone) <= 1e-6


async def test_a_killed_rank_of_another_host_is_named_and_ends_all(
    remote: RemoteHost, runtime: Runtime, lane: DeviceLane
) -> None:
    policy = mlp()
    trajectories = episodes(policy)
    learner = ShardedLearner(policy, runtime, lane, settings(ranks=2))
    learner.assign_ranks(assign_ranks(remote, 1))
    async with learner:
        await learner.update(trajectories, list(ADVANTAGES))
        pids = [runtime.info(rank).pid for rank in learner.ranks.ranks]
        os.kill(pids[1], signal.SIGKILL)
        told = r"rank 1 of 2 on host 'a' \(pid \d+\) is gone: SIGKILL"
        with pytest.raises(RankFailed, match=told):
            await asyncio.wait_for(learner.update(trajectories, list(ADVANTAGES)), 10)
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_port_in_use_and_a_missing_interface_are_refused_by_name(
    remote: RemoteHost, runtime: Runtime, lane: DeviceLane
) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"at 127.0.0.1, port {port}: Address already in use"
        ):
            RendezvousServer(Network(LOOPBACK), port, 2)
    assert find_interface(Network(LOOPBACK)) == "lo"
    assert find_interface(Network("203.0.113.7", "lo")) == "lo"
    with pytest.raises(
        ConfigError, match=r"interface 'ib7' does not exist here; there are .*lo \("
    ):
        find_interface(Network(LOOPBACK, "ib7"))
    with pytest.raises(ConfigError, match=r"no network interface here has the address 203.0.113.7"):
        find_interface(Network("203.0.113.7"))
    remote_rank = RankAssignment(
        "cpu", host="a", placement=remote, address=LOOPBACK, interface="ib7"
    )
    learner = ShardedLearner(mlp(), runtime, lane, settings(ranks=2))
    learner.assign_ranks(RankAssignments((RankAssignment("cpu", address=LOOPBACK), remote_rank)))
    with pytest.raises(ConfigError, match="rank 1 on host 'a': the network interface 'ib7' does"):
        async with learner:
            pass


async def test_a_host_without_the_policys_module_is_named(
    remote: RemoteHost, runtime: Runtime, lane: DeviceLane
) -> None:
    plain = mlp()
    policy = type("Own", (MlpPolicy,), {"__module__": "nowhere"})(plain.config, plain.network)
    learner = ShardedLearner(policy, runtime, lane, settings(ranks=2))
    learner.assign_ranks(
        RankAssignments((RankAssignment("cpu", host="a", placement=remote, address=LOOPBACK),) * 2)
    )
    told = r"rank \d on host 'a' cannot import nowhere:Own: .*PYTHONPATH"
    with pytest.raises(ConfigError, match=told):
        await learner.__aenter__()


async def test_ranks_that_cannot_reach_rank_0_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.learner.distributed.rendezvous.RENDEZVOUS_TIMEOUT_S", 0.2)
    server = RendezvousServer(Network(LOOPBACK), 0, 2)
    rendezvous = server.rendezvous
    del server
    with pytest.raises(
        ConfigError, match=rf"rank 1 cannot reach rank 0 at .* port {rendezvous.port}"
    ):
        join_group(rendezvous, Network(LOOPBACK), 1, 2, "gloo")


async def test_hosts_with_other_code_are_refused_by_name() -> None:
    local = code_report("small_episodes:Policy")
    assert {"torch", "vla_rl's sources", "module small_episodes"} <= local.keys()
    require_same_code("a", dict(local), local)
    remote_rank = local | {"torch": "2.0.0+cpu", "module small_episodes": "none"}
    with pytest.raises(ConfigError, match=r"host 'a' has torch 2.0.0\+cpu \(here .*module small_e"):
        require_same_code("a", remote_rank, local)


async def test_the_bytes_that_ranks_of_a_host_read_are_sent_once() -> None:
    assert merge_ranges([(8, 12), (0, 4), (2, 6), (5, 5), (6, 8)]) == [(0, 12)]
    assert merge_ranges([(0, 4), (5, 6)]) == [(0, 4), (5, 6)]
    size = 16 << 20
    assert split_ranges([(1, size + 2), (2 * size, 2 * size + 1)]) == [
        (1, size + 1),
        (size + 1, size + 2),
        (2 * size, 2 * size + 1),
    ]


async def test_times_of_another_host_are_shifted_to_this_hosts_clock() -> None:
    times = RankTimes([("update", 1.0, 2.0)], [("all-gather", 1.5, 1.75)], 7)
    assert times.shifted(0.5) == RankTimes([("update", 1.5, 2.5)], [("all-gather", 2.0, 2.25)], 7)


async def test_ranks_of_one_host_meet_in_a_file_whatever_its_folder_is_called(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a #1, 50 %?"
    folder.mkdir()
    try:
        join_group(Rendezvous(file=str(folder / "rendezvous")), None, 0, 1, "gloo")
        assert [path.name for path in folder.iterdir()] == ["rendezvous"]
    finally:
        dist.destroy_process_group()
