"""A run whose episodes are on the nodes of a Ray cluster.

Needs ray, which is no part of the ordinary environment: `make test-ray`.
"""

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import uvloop
from toy_runs import small_run

from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.ray_config import RayConfig
from vla_rl.commands.layout_plan import layout_plan
from vla_rl.commands.plan import EpisodeFootprint, print_plan
from vla_rl.errors import ConfigError
from vla_rl.observe import RunDirectory, read_metrics
from vla_rl.recipes.srpo_toy import SrpoToyConfig, policy_of, starts_of
from vla_rl.rollout import embodied_agent
from vla_rl.training.run import TrainingRun
from vla_rl.training.team import Team

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


async def test_a_dry_run_shows_what_is_reserved_and_joins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    had_ray = "ray" in sys.modules  # of another test
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    config = config_of(tmp_path, address="10.0.0.1:6379", num_hosts=2)
    shown = await layout_plan(config, footprint, Team.of(policy_of(config)))
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
