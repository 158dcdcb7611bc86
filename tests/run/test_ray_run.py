"""A run whose episodes are on the nodes of a Ray cluster.

Needs ray, which is no part of the ordinary environment: `make test-ray`.
"""

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from ranked_runs import books_of, numbers_of, ranked_run, trained
from toy_runs import small_run

from vla_rl.cli.layout_plan import layout_plan
from vla_rl.cli.plan import EpisodeFootprint, print_plan
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.ray_config import RayConfig
from vla_rl.errors import ConfigError
from vla_rl.recipes.srpo_toy import SrpoToyConfig, policy_of, starts_of
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import TrainingRun
from vla_rl.team.members import Team

needs_ray = pytest.mark.skipif(
    # ray reads it when it is imported
    find_spec("ray") is None or os.environ.get("RAY_AUTH_MODE") != "token",
    reason="ray is not installed, or runs without a token: make test-ray",
)


def config_of(root: Path, **ray: object) -> SrpoToyConfig:
    cluster = ClusterConfig(ray=RayConfig(**{"address": "local", **ray}))
    return msgspec.structs.replace(small_run(root), cluster=cluster)


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_run_starts_a_cluster_and_runs_its_episodes_there(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    training = TrainingRun(config, starts_of(config), policy_of(config), agent=embodied_agent)
    run = RunDirectory.create(tmp_path, "small", config, {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(training.execute(run))
    lines = read_metrics(run.metrics)
    assert [line["update"] for line in lines] == [1, 2]
    (episodes,) = (
        key for key in lines[-1] if key.startswith("hosts/") and key.endswith("/episodes")
    )
    assert lines[-1][episodes] >= 8


@pytest.fixture
def nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster, and its last node: a head without cores and two nodes with addresses of their own."""
    from ray.cluster_utils import Cluster

    node = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    try:
        cluster.add_node(**node, num_cpus=2, node_ip_address="127.0.0.2")
        yield cluster, cluster.add_node(**node, num_cpus=2, node_ip_address="127.0.0.3")
    finally:
        cluster.shutdown()


@needs_ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(500)
async def test_ranks_on_two_nodes_learn_what_one_process_learns_and_continue_without_a_lost_one(
    tmp_path: Path, nodes: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ray_cluster, last = nodes
    alone = await trained(ranked_run(tmp_path / "alone", 1, updates=3))
    cluster = ClusterConfig(
        ray=RayConfig(address=ray_cluster.address, num_hosts=2, interface="lo", look_every_s=None),
        learners=("127.0.0.2", "127.0.0.3"),
        plays_here=True,
        allow_unencrypted_ranks=True,
    )

    def strike(update: int) -> None:
        if update == 2:
            ray_cluster.remove_node(last, allow_graceful=False)

    shared = await trained(ranked_run(tmp_path / "shared", 2, updates=3, cluster=cluster), strike)
    out = capsys.readouterr().out
    assert re.search(r"rank 1 of 2 on host '127.0.0.3' \(pid \d+\) is gone: .* update 1", out)
    assert re.search(
        r"the host '127.0.0.3', which has ranks, is away.* Restart 2 of .* update 1\n", out
    )
    assert numbers_of(shared) == pytest.approx(numbers_of(alone), rel=1e-4, abs=1e-6)
    assert await books_of(shared, 3) == await books_of(alone, 3)


async def test_a_dry_run_places_ranks_on_named_nodes(tmp_path: Path) -> None:
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    config = config_of(tmp_path, address="10.0.0.1:6379", num_hosts=3, gpus_per_host=2)
    config = msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, learners=("10.0.0.2:0-1",)),
        learner=msgspec.structs.replace(config.learner, ranks=2),
        run=msgspec.structs.replace(config.run, device="cuda"),
    )
    _, shown = await layout_plan(config, footprint, Team.of(policy_of(config)))
    assert re.search(r"10\.0\.0\.2 +0-1 +ranks 0-1 +- ", shown), shown
    assert re.search(r"node 0 +0-1 +- +engines 0-1", shown)


async def test_a_dry_run_shows_what_is_reserved_and_joins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    had_ray = "ray" in sys.modules  # of another test
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    config = config_of(tmp_path, address="10.0.0.1:6379", num_hosts=2)
    _, shown = await layout_plan(config, footprint, Team.of(policy_of(config)))
    assert "layout apart: 1 learner rank, 2 engines, 4 simulators on 3 hosts" in shown
    assert "the cluster itself is asked when the run starts" in shown
    print_plan(config, footprint, 0, 0)
    assert "10.0.0.1:6379" in capsys.readouterr().out
    assert ("ray" in sys.modules) == had_ray


def test_without_ray_the_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    if find_spec("ray") is not None:
        pytest.skip("ray is installed")
    config = config_of(tmp_path)
    training = TrainingRun(config, starts_of(config), policy_of(config), agent=embodied_agent)
    run = RunDirectory.create(tmp_path, "small", config, {})
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(ConfigError, match=r"Ray is not installed.*pip install"),
    ):
        runner.run(training.execute(run))


def test_hosts_are_listed_or_found_by_ray() -> None:
    with pytest.raises(ConfigError, match=r"none beside ray\.address"):
        ClusterConfig(hosts="hosts.toml", ray=RayConfig(address="auto"))
    assert "num_hosts" in RayConfig().unread()
    assert RayConfig(address="auto").unread() == {}
    assert ClusterConfig(ray=RayConfig(address="auto")).has_hosts
