"""A run learns the same if other hosts run its episodes, also if one of them is killed meanwhile."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import uvloop
from served_hosts import ServedHost, listed, on_loopback
from slow_agents import hesitant_agent
from toy_runs import deterministic, small_mlp_run

from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from vla_rl.cluster.config import ClusterConfig
from vla_rl.graph import Node, NodeOutput
from vla_rl.recipes.train_toy import TrainToyConfig, policy_of, starts_of
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import TrainingRun
from vla_rl.types import Agent

UPDATES = 6


@pytest.fixture(autouse=True)
def _hosts_import_our_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{support}")


@pytest.fixture
def namespaces() -> Iterator[tuple[NamespaceHost, ...]]:
    try:
        with network_namespaces(3) as opened:
            yield opened
    except NamespacesRefused as reason:
        pytest.skip(str(reason))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - metrics have no event
        await asyncio.sleep(0.01)


def config_of(root: Path, hosts: Path | None, updates: int) -> TrainToyConfig:
    config = deterministic(small_mlp_run(root, "embodied_srpo"), num_envs=2)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, updates=updates, device="cpu"),
        cluster=ClusterConfig(hosts=None if hosts is None else str(hosts)),
    )


def weights_after(
    config: TrainToyConfig, strikes: "Strikes | None" = None, agent: Agent = hesitant_agent
) -> dict[str, torch.Tensor]:
    """Run it, with what happens meanwhile; return what it has learnt."""
    model = policy_of(config)
    hold = Strikes.never if strikes is None else strikes.hold
    training = TrainingRun(
        config,
        starts_of(config),
        model,
        agent=agent,
        customise=lambda pipeline: pipeline.insert_after(
            "reward", Node.declare("hold", hold, reads="rewards")
        ),
    )
    directory = RunDirectory.create(Path(config.run.root), config.run.name, config, {})

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            if strikes is not None:
                tasks.create_task(strikes.run(training))
            await training.execute(directory)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


class Strikes:
    """Kills a host while it runs episodes, and starts it again later."""

    def __init__(self, victim: ServedHost) -> None:
        self._victim, self._num_updates = victim, 0
        self._has_joined = asyncio.Event()

    @staticmethod
    async def never(rewards: np.ndarray) -> NodeOutput:
        """Hold no update back."""
        return NodeOutput(values={})

    async def hold(self, rewards: np.ndarray) -> NodeOutput:
        """Hold the fourth update back until the host is here again."""
        self._num_updates += 1
        if self._num_updates == 4:
            await self._has_joined.wait()
        return NodeOutput(values={})

    async def run(self, training: TrainingRun) -> None:
        parts = training._parts
        assert parts.hosts is not None
        players, name = parts.hosts.players, self._victim.name

        def has(what: str) -> bool:
            return players.metrics().get(f"hosts/{name}/{what}", 0.0) >= 1

        await until(lambda: has("episodes"))
        await until(lambda: has("episodes_playing"))
        self._victim.kill()
        await until(lambda: name not in players.hosts)
        await asyncio.to_thread(self._victim.start)
        await until(lambda: name in players.hosts)
        self._has_joined.set()
        # counted anew since it joined
        await until(lambda: has("episodes"))


def require_equal(learnt: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert learnt.keys() == expected.keys()
    assert all(torch.equal(learnt[name], expected[name]) for name in expected)


def metrics_below(root: Path) -> list[dict[str, Any]]:
    (run,) = root.iterdir()
    return read_metrics(run / "metrics.jsonl")


def clocks_apart(folder: Path) -> dict[str, str]:
    """Return an environment in which Python's clocks are a week ahead, in all processes there."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "for name in ('time', 'monotonic'):\n"
        "    here = getattr(time, name)\n"
        "    setattr(time, name, lambda here=here: here() + 7 * 86400.0)\n"
    )
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}


def test_a_run_whose_episodes_another_host_runs_learns_what_one_host_learns_whatever_its_clock(
    tmp_path: Path,
) -> None:
    far = on_loopback("a", tmp_path / "keys", env=clocks_apart(tmp_path / "clocks"))
    try:
        hosts = listed([far], tmp_path)
        learnt = weights_after(config_of(tmp_path / "far", hosts, 2), agent=embodied_agent)
    finally:
        far.kill()
    expected = weights_after(config_of(tmp_path / "here", None, 2), agent=embodied_agent)
    require_equal(learnt, expected)
    metrics = metrics_below(tmp_path / "far")
    assert [line["update"] for line in metrics] == [1, 2]
    assert metrics[-1]["hosts/a/episodes"] >= 1


# the test above has one host and no namespaces, tests/rollout/test_host_players.py the lost ones
@pytest.mark.proof
@pytest.mark.needs_root
@pytest.mark.timeout(580)
def test_a_run_on_two_hosts_one_killed_and_started_again_learns_what_one_host_learns(
    namespaces: tuple[NamespaceHost, ...], tmp_path: Path
) -> None:
    control, *others = namespaces
    far = [
        ServedHost(name, f"{each.address}:7070", tmp_path / "keys", each.popen)
        for name, each in zip("ab", others, strict=True)
    ]
    hosts = listed(far, tmp_path)
    # sockets and threads of the run belong to the namespace from here on
    with control.entered():
        learnt = weights_after(config_of(tmp_path / "far", hosts, UPDATES), Strikes(far[0]))
    for host in far:
        host.kill()
    require_equal(learnt, weights_after(config_of(tmp_path / "here", None, UPDATES)))
    metrics = metrics_below(tmp_path / "far")
    assert len(metrics) == UPDATES
    assert metrics[-1]["rollout/lost/died"] >= 1
