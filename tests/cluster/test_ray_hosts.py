"""Hosts of a Ray cluster: two nodes, what is refused, and how hosts come and go.

Needs ray, which is no part of the ordinary environment: `make test-ray`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vla_rl.actors import Actor, Runtime
from vla_rl.cluster.config import RayConfig
from vla_rl.cluster.hosts import Joined, Left
from vla_rl.cluster.ray_hosts import RayHosts
from vla_rl.errors import ConfigError

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError:
    ray = None

needs_ray = pytest.mark.skipif(
    # ray reads it when it is imported
    ray is None or os.environ.get("RAY_AUTH_MODE") != "token",
    reason="ray is not installed, or runs without a token: make test-ray",
)
pytestmark = [pytest.mark.filterwarnings("ignore")]


class Where(Actor):
    """Tells which process it is in."""

    async def pids(self) -> list[int]:
        return [os.getpid(), os.getppid()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with four cores each, with a token."""
    made = Cluster(initialize_head=True, head_node_args=NODE)
    made.add_node(**NODE)
    yield made
    made.shutdown()


NODE = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 * 2**20}


def config(cluster: Any, **others: Any) -> RayConfig:
    return RayConfig(**{"address": cluster.address, "num_hosts": 2, "look_every_s": None, **others})


@needs_ray
async def test_an_actor_runs_on_each_of_two_nodes_and_nothing_stays(cluster: Any) -> None:
    async with asyncio.timeout(200):
        async with RayHosts(config(cluster)) as hosts, Runtime() as runtime:
            local, *others = hosts.hosts()
            assert local.placement is None
            assert len({host.name for host in others}) == 2
            servers = set()
            for host in others:
                assert host.placement is not None
                assert host.resources.num_cores == 1
                where = await runtime.spawn(Where, placement=host.placement)
                pid, server = await where.pids()
                assert pid != os.getpid()
                servers.add(server)
            assert len(servers) == 2
        assert not any(psutil.pid_exists(server) for server in servers)
        assert not ray.is_initialized()


@needs_ray
async def test_a_host_whose_server_is_killed_has_left_and_its_node_joins_again(
    cluster: Any,
) -> None:
    async with asyncio.timeout(200):
        async with RayHosts(config(cluster, look_every_s=0.2)) as hosts, Runtime() as runtime:
            first, second = hosts.hosts()[1:]
            assert first.placement is not None
            where = await runtime.spawn(Where, placement=first.placement)
            _, server = await where.pids()
            os.kill(server, signal.SIGKILL)
            changes = hosts.changes()
            left = await anext(changes)
            assert isinstance(left, Left)
            assert left.host == first
            joined = await anext(changes)
            assert isinstance(joined, Joined)
            assert joined.host.name == first.name
            assert joined.host.placement != first.placement
            assert list(hosts.hosts()[1:]) == [second, joined.host]


@needs_ray
async def test_a_node_that_is_added_joins_and_one_that_is_killed_leaves(cluster: Any) -> None:
    async with asyncio.timeout(200):
        async with RayHosts(config(cluster, look_every_s=0.2)) as hosts:
            node = cluster.add_node(**NODE)  # blocks the loop: ray wants the main thread
            changes = hosts.changes()
            joined = await anext(changes)
            assert isinstance(joined, Joined)
            assert joined.host in hosts.hosts()
            cluster.remove_node(node, allow_graceful=False)
            left = await anext(changes)
            assert isinstance(left, Left)
            assert left.host == joined.host
            # Ray notices it later than we do, and counts it until then, which other tests would see
            while ray.cluster_resources().get("CPU") != 8 or _num_alive() != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.5)


def _num_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


@needs_ray
@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"num_hosts": 9}, r"num_hosts \* CPUs per host = 9 \* 1 = 9 > 8"),
        ({"num_hosts": 3}, "num_hosts=3 > 2 nodes of the Ray cluster with >= 1 CPUs"),
        ({"gpus_per_host": 8}, r"2 \* 8 = 16 > 0, which the Ray cluster has"),
    ],
)
async def test_a_cluster_without_the_resources_is_refused_with_the_inequality(
    cluster: Any, others: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        await RayHosts(config(cluster, **others)).__aenter__()
    assert not ray.is_initialized()


@needs_ray
async def test_a_node_whose_cores_another_program_holds_is_named(cluster: Any) -> None:
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDS_ALL_CORES, cluster.address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    try:
        async with asyncio.timeout(200):
            assert await other.stdout.readline() == b"held\n"
            with pytest.raises(
                ConfigError, match=r"0 hosts of Ray, expected num_hosts=2: node .* did not give"
            ):
                await RayHosts(config(cluster, reserve_within_s=1.0)).__aenter__()
    finally:
        other.kill()
        await other.wait()


HOLDS_ALL_CORES = """
import sys
import ray

ray.init(address=sys.argv[1], log_to_driver=False)
group = ray.util.placement_group([{"CPU": 4}] * 2, strategy="STRICT_SPREAD")
assert group.wait(60)
print("held", flush=True)
sys.stdin.read()
"""


@needs_ray
def test_a_cluster_without_authentication_is_refused_unless_allowed(tmp_path: Path) -> None:
    program = tmp_path / "open_cluster.py"
    program.write_text(OPEN_CLUSTER)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_AUTH_TOKEN", None)
    found = subprocess.run(
        [sys.executable, str(program)],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert "has no authentication, expected token authentication" in found.stdout, found.stderr
    assert "allowed: 2 hosts" in found.stdout


OPEN_CLUSTER = """
import asyncio
from ray.cluster_utils import Cluster
from vla_rl.cluster.config import RayConfig
from vla_rl.cluster.ray_hosts import RayHosts

async def main(address):
    try:
        await RayHosts(RayConfig(address=address)).__aenter__()
    except Exception as error:
        print(error)
    async with RayHosts(RayConfig(address=address, allow_open_cluster=True)) as hosts:
        print("allowed:", len(hosts.hosts()), "hosts")

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
asyncio.run(main(cluster.address))
cluster.shutdown()
"""


async def test_without_ray_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'vla_rl\[ray\]'"):
        await RayHosts(RayConfig(address="local")).__aenter__()


async def test_an_old_ray_is_refused_with_the_version_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old: Any = types.ModuleType("ray")
    old.__version__, old.__path__ = "2.40.0", []
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, old)
    with pytest.raises(ConfigError, match=r"Ray is 2\.40\.0, expected >= 2\.52"):
        await RayHosts(RayConfig(address="local")).__aenter__()


@pytest.mark.parametrize(
    "wrong", [{"num_hosts": 0}, {"cores_per_host": 0}, {"reserve_within_s": 0.0}, {"address": ""}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RayConfig(**wrong)
