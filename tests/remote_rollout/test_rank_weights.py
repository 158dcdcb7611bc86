"""Weights go from the learner's ranks to hosts in shards; no process has a copy of all."""

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from host_cluster import loopback_hosts
from own_parts import by_turns
from small_episodes import SHAPE, mlp, walk
from toy_runs import ranked_run
from weight_hosts import Host, Site, hosts_runtime

from benchmarks import conversations
from benchmarks.sharded_learning import episodes as family_episodes, small_oft
from benchmarks.shared_updates import saved, settings
from vla_rl.actors import LastingForkServers, RemoteHost, Runtime, make_keys, read_keys
from vla_rl.actors.host import HostServer
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane
from vla_rl.engines.weight_shards import WeightShard
from vla_rl.errors import ActorDied, RankFailed, WeightsNotGiven
from vla_rl.learner import Learner
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.remote_rollout import weight_links
from vla_rl.remote_rollout.flat_weights import flatten_weights, weights_digest
from vla_rl.remote_rollout.weight_sources import MemberWeightSink, WeightHost
from vla_rl.reporting import read_metrics
from vla_rl.run.train import train
from vla_rl.team.members import Member, Team

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADVANTAGES = [1.0, -0.5]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


@pytest_asyncio.fixture(loop_scope="session", scope="module", autouse=True)
async def runtime_of_hosts() -> AsyncIterator[None]:
    async with hosts_runtime():
        yield


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def runtime(lasting_servers: LastingForkServers) -> AsyncIterator[Runtime]:
    async with Runtime(fork_servers=lasting_servers) as runtime:
        yield runtime


def acting(*names: str) -> tuple[list[Host], Site]:
    """Hosts that act with other weights than the learner begins with, and their site."""
    log: list[str] = []
    hosts = [Host(name, log, network=mlp(seed=7).network) for name in names]
    site = Site(*hosts)
    site.open()
    return hosts, site


def episodes(policy: MlpPolicy) -> list[Any]:
    return [walk(policy, 1, 3), walk(policy, 2, 4)]


async def test_hosts_get_from_the_ranks_the_bytes_that_this_process_would_have_sent(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy = mlp()
    first = weights_digest(policy.network)
    hosts, site = acting("a", "b", "c")
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            for _ in range(2):
                await two.update(episodes(policy), ADVANTAGES)
            # the weights have not been here
            assert weights_digest(policy.network) == first
        # they come at the end of the run
        expected = flatten_weights(policy.network, 2)
    await site.wait_applied()
    assert weights_digest(policy.network) == expected.digest != first
    assert [host.digest for host in hosts] == [expected.digest] * 3
    assert [weights_digest(host.network) for host in hosts] == [expected.digest] * 3
    assert [(host.version, host.num_put) for host in hosts] == [(2, 0)] * 3
    assert site.versions == [1, 2]
    assert hosts[0].log.count("take shards a") == 2
    assert "take shards b" not in hosts[0].log


# all of learner/distributed/test_rank_hosts.py has such ranks, and the test above such hosts
@pytest.mark.proof
async def test_ranks_on_another_host_give_their_weights_too(
    lane: DeviceLane, runtime: Runtime, tmp_path: Path
) -> None:
    policy = mlp()
    hosts, site = acting("a", "far")
    make_keys(tmp_path)
    ours, theirs = (read_keys(tmp_path / f"{name}.key") for name in ("client", "server"))
    opened = HostServer("tcp://127.0.0.1:0", theirs, [ours.public], lost_after_s=20.0)
    async with asyncio.timeout(200), opened as server:
        there = RemoteHost(
            address=server.address,
            server_public_key=theirs.public,
            client_keys=ours,
            lost_after_s=20.0,
        )
        remote = RankAssignment("cpu", host="far", placement=there, address="127.0.0.1")
        two = ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink])
        two.assign_ranks(RankAssignments((RankAssignment("cpu", address="127.0.0.1"), remote)))
        async with two:
            await two.update(episodes(policy), ADVANTAGES)
    await site.wait_applied()
    assert [host.digest for host in hosts] == [weights_digest(policy.network)] * 2
    assert [host.num_put for host in hosts] == [0, 0]
    # the host that has one of the ranks is the first: this shard uses no cable
    assert "take shards far" in hosts[0].log
    assert "take shards a" not in hosts[0].log


async def test_an_update_that_changed_nothing_sends_no_bytes(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy = mlp()
    (host,), site = acting("a")
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            await two.update(episodes(policy), ADVANTAGES)
            await site.wait_applied()
            host.log.clear()
            await two.update(episodes(policy), [0.0, 0.0])
    await site.wait_applied()
    assert (host.log, host.version) == (["renew a"], 2)


LARGE = msgspec.structs.replace(SHAPE, hidden=(64, 1 << 16, 64))
"""34 MB: eight pieces of each of two ranks. Narrow layers beside a wide one are made orthogonal in
no time.
"""


class Struck(Host):
    """Something happens once it has some of what the ranks give."""

    strike: Callable[[], None]

    async def receive_shards(self, member: str, shards: list[WeightShard]) -> str:
        receiving = asyncio.create_task(super().receive_shards(member, shards))
        while self.received(member) == 0:  # noqa: ASYNC110 - bytes have no event
            await asyncio.sleep(0)
        try:
            self.strike()
        except ActorDied:
            receiving.cancel()
            await asyncio.wait([receiving])
            raise
        return await receiving


@functools.cache
def large_policy() -> MlpPolicy:
    """Made once, for half a second; tests get copies."""
    return MlpPolicy.create(LARGE, 0)


def large(*names: str, struck: str) -> tuple[MlpPolicy, list[Host], Site]:
    """A policy, and hosts that act with other weights than its learner begins with."""
    log: list[str] = []
    hosts = [
        (Struck if name == struck else Host)(name, log, network=deepcopy(large_policy().network))
        for name in names
    ]
    for host in hosts:
        for parameter in host.network.parameters():
            parameter.data.neg_()
    site = Site(*hosts)
    site.open()
    return deepcopy(large_policy()), hosts, site


async def test_a_rank_that_dies_in_the_middle_ends_all_and_no_host_applies(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy, hosts, site = large("a", "b", struck="a")
    before = [weights_digest(host.network) for host in hosts]
    struck_s = 0.0

    async def learn() -> None:
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            pid = runtime.info(two.ranks.ranks[1]).pid

            def strike() -> None:
                nonlocal struck_s
                struck_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)

            hosts[0].strike = strike  # type: ignore[attr-defined]
            await two.update(episodes(policy), ADVANTAGES)

    async with asyncio.timeout(200):
        with pytest.raises(RankFailed, match=r"rank 1 of 2 .* is gone: SIGKILL"):
            await learn()
    # no peer waits for the silence of another
    assert time.monotonic() - struck_s < 20.0
    assert [weights_digest(host.network) for host in hosts] == before
    assert (site.versions, site.lost) == ([], [])


async def test_a_host_that_dies_in_the_middle_is_dropped_and_the_others_take_from_the_ranks(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy, hosts, site = large("lost", "b", "c", struck="lost")

    def die() -> None:
        hosts[0].cache.close()
        raise hosts[0].death()

    hosts[0].strike = die  # type: ignore[attr-defined]
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            await two.update(episodes(policy), ADVANTAGES)
    await site.wait_applied()
    assert (site.lost, list(site.weights.hosts), site.versions) == (["lost"], ["b", "c"], [1])
    assert [host.digest for host in hosts[1:]] == [weights_digest(policy.network)] * 2
    assert [host.num_put for host in hosts] == [0, 0, 0]


async def test_a_host_that_joins_gets_the_newest_version_from_a_host_or_else_from_the_ranks(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy = mlp()
    (first,), site = acting("first")
    late, last = (Host(name, first.log, network=mlp(7).network) for name in ("late", "last"))
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            await two.update(episodes(policy), ADVANTAGES)
            await site.wait_applied()
            first.log.clear()
            assert await site.catch_up(late) == 1
            assert "take late" in first.log
            for name in ("first", "late"):
                site.weights.leave(name)
            first.log.clear()
            assert await site.catch_up(last) == 1
            assert "take shards last" in first.log
            # the ranks have made a step since, and its version is not published yet
            await two.ranks.optim_step(publish=False)
            with pytest.raises(WeightsNotGiven, match="newer weights by now"):
                await site.catch_up(Host("early", [], network=mlp(7).network))
            waiting = Host("waits", [], network=mlp(7).network)
            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(site.join(waiting))
                await asyncio.sleep(0)
                await two.ranks.optim_step(publish=True)
            assert joining.result() == waiting.version == 2
    await site.wait_applied()
    assert first.digest == late.digest == last.digest != ""


async def test_hosts_that_the_ranks_cannot_reach_are_served_by_this_process_with_one_warning(
    lane: DeviceLane, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    policy = mlp()
    (host,), site = acting("a")
    # an address at which no one listens
    site.weights.hosts["a"] = WeightHost(host, "127.0.0.2")  # type: ignore[arg-type]
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            for _ in range(2):
                await two.update(episodes(policy), ADVANTAGES)
                await site.wait_applied()
                assert host.digest == weights_digest(policy.network)
    await site.wait_applied()
    assert caplog.text.count("go to other hosts through this process") == 1
    assert (host.version, host.log.count("open sockets a")) == (2, 1)


@pytest.mark.proof
async def test_a_host_that_the_ranks_cannot_reach_takes_weights_from_one_that_they_can(
    lane: DeviceLane,
    runtime: Runtime,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_links, "LINK_WITHIN_S", 0.2)
    policy = mlp()
    (shut, other), site = acting("shut", "open")
    site.weights.hosts["shut"] = WeightHost(shut, "127.0.0.2")  # type: ignore[arg-type]
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, settings(ranks=2), [site.sink]) as two:
            await two.update(episodes(policy), ADVANTAGES)
            await site.wait_applied()
            num_bytes = other.num_put
            assert num_bytes > 0
            for _ in range(2):
                await two.update(episodes(policy), ADVANTAGES)
    await site.wait_applied()
    assert (shut.num_put, other.num_put) == (0, num_bytes)
    assert caplog.text.count("go to other hosts through this process") == 1
    assert shut.digest == other.digest == weights_digest(policy.network)


async def test_a_resume_gives_weights_to_a_host_unless_it_has_them(
    lane: DeviceLane, runtime: Runtime, tmp_path: Path
) -> None:
    policy = mlp()
    async with asyncio.timeout(200):
        before = Learner(policy, lane, settings())
        await before.update(episodes(policy), ADVANTAGES)
        state = await saved(before, tmp_path)
        host = Host("a", [], network=mlp(7).network)
        host.version, host.digest = 2, "of an update that was not saved"
        site, resumed = Site(host), mlp(3)
        async with ShardedLearner(resumed, runtime, lane, settings(ranks=2), [site.sink]) as two:
            await two.restore(state)
            assert (site.versions, host.log) == ([1], [])
            site.open()
            assert await site.catch_up(host) == 1
            assert host.digest == weights_digest(resumed.network) == weights_digest(policy.network)
            host.log.clear()
            assert await site.catch_up(host) == 1
            assert host.log == []


class Near:
    """An engine of this process: it reads the model."""

    def __init__(self) -> None:
        self.network, self.digests = torch.nn.Module(), list[str]()

    def apply_weights(self, network: torch.nn.Module, weight_version: int) -> None:
        self.digests.append(weights_digest(network))


async def test_an_engine_here_and_hosts_elsewhere_act_with_the_same_weights(
    lane: DeviceLane, runtime: Runtime
) -> None:
    policy, near = mlp(), Near()
    (host,), site = acting("a")
    sinks: list[WeightSink] = [near, site.sink]
    async with asyncio.timeout(200):
        config = settings(ranks=2, shard="weights")
        async with ShardedLearner(policy, runtime, lane, config, sinks) as two:
            await two.update(episodes(policy), ADVANTAGES)
    await site.wait_applied()
    assert near.digests == [host.digest]
    assert weights_digest(host.network) == host.digest == weights_digest(policy.network)
    assert host.num_put == 0


def adapted() -> Any:
    return small_oft().adapted(LoraConfig(rank=2, alpha=4), seed=1)


def halved() -> Any:
    policy = small_oft()
    policy.network.to(torch.bfloat16)
    return policy


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        # the test above has such ranks
        pytest.param(mlp, {"shard": "weights"}, id="weights", marks=pytest.mark.proof),
        pytest.param(mlp, {"shard": "replicas"}, id="replicas", marks=pytest.mark.proof),
        # learner/distributed/test_tensor_parallel.py gives the weights of such ranks to a host, too
        pytest.param(
            conversations.qwen3,
            {"tensor_parallel": 2},
            id="tensor parallel",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            conversations.qwen3,
            {"shard": "replicas"},
            id="replicas of a language policy",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            small_oft, {"shard": "weights"}, id="weights of a robot policy", marks=pytest.mark.proof
        ),
        pytest.param(adapted, {"shard": "replicas"}, id="adapters", marks=pytest.mark.proof),
        pytest.param(halved, {"offload": True}, id="bfloat16", marks=pytest.mark.proof),
    ],
)
async def test_what_each_rank_holds_arrives_at_its_place(
    make: Callable[[], Any], changes: dict[str, Any], lane: DeviceLane, runtime: Runtime
) -> None:
    policy, other = make(), make()
    host = Host("a", [], network=other.network)
    site = Site(host)
    site.open()
    config = settings(ranks=2, **changes)
    is_mlp = isinstance(policy, MlpPolicy)
    trajectories = [*episodes(policy), walk(policy, 3, 2)] if is_mlp else family_episodes(policy)
    async with asyncio.timeout(200):
        async with ShardedLearner(policy, runtime, lane, config, [site.sink]) as two:
            await two.update(trajectories, [1.0, -0.5, 0.25])
    await site.wait_applied()
    assert host.digest == weights_digest(policy.network)
    assert weights_digest(other.network) == host.digest != weights_digest(make().network)


AGENT = partial(by_turns, first="left")


async def learnt(config: TrainToyConfig) -> list[torch.Tensor]:
    """Train a pair, of which one learns in each update; return the weights of both."""
    members = {}
    for seed, name in enumerate(("left", "right")):
        run = msgspec.structs.replace(config.run, seed=seed)
        members[name] = Member(new_policy(msgspec.structs.replace(config, run=run)))
    await train(config, training_starts(config), Team(members, updates_per_turn=1), agent=AGENT)
    return [
        weight.clone()
        for member in members.values()
        for weight in member.model.network.state_dict().values()
    ]


# tests/remote_rollout/test_rank_weights.py has the parts
@pytest.mark.proof
@pytest.mark.timeout(500)
async def test_a_pair_whose_ranks_give_their_weights_to_hosts_learns_what_it_learns_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    local = await learnt(ranked_run(tmp_path / "here", 2, updates=3))

    def refuse(*_: object) -> None:
        raise AssertionError("the weights go through this process")

    monkeypatch.setattr(MemberWeightSink, "apply_weights", refuse)
    async with asyncio.timeout(400), loopback_hosts(tmp_path, 2) as listed:
        # one rank of each policy here, and one on another host; the third acts
        cluster = ClusterConfig(
            hosts=str(listed), learners=("here", "far1"), allow_unencrypted_ranks=True
        )
        remote = await learnt(ranked_run(tmp_path / "far", 2, updates=3, cluster=cluster))
    assert all(torch.equal(*pair) for pair in zip(remote, local, strict=True))
    (run,) = (tmp_path / "far").iterdir()
    newest = read_metrics(run / "metrics.jsonl")[-1]
    assert newest["left/hosts/weights_s"] > 0.0
    assert newest["right/hosts/weights_s"] > 0.0
    assert newest["hosts/far2/episodes"] == 12
