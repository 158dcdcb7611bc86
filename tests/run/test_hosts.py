"""Whole runs whose episodes run on other hosts, listed or of Ray."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import uvloop
from host_cluster import ServedHost, loopback_hosts, on_loopback, start_and_list
from own_parts import by_turns, hesitant_agent
from toy_runs import (
    deterministic,
    episode_counts,
    ranked_run,
    small_mlp_run,
    small_run,
    train_ranked,
    update_numbers,
)

from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from vla_rl.actors import InLoop, Runtime
from vla_rl.cli.dry_run import plan_layout, print_plan
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.cluster.config import ClusterConfig, RayConfig
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.graph import Node, NodeOutput
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.pipelines.config import MixedTrainingConfig, RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.side_by_side import LANGUAGE, REWARD, ROBOT, mixed_agent
from vla_rl.recipes.srpo_toy import (
    SrpoToyConfig,
    new_policy as reach_policy,
    training_starts as reach_starts,
)
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, env_spec, new_policy, training_starts
from vla_rl.remote_rollout.host_control import RolloutHostRunner
from vla_rl.remote_rollout.host_recipe import make_host_recipe, read_pieces
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import (
    ChatLimits,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
    embodied_agent,
)
from vla_rl.run.train import TrainingRun, train
from vla_rl.team.members import Member, Team, make_engines
from vla_rl.team.pools import make_pool
from vla_rl.types import Agent, EnvSpec, Trajectory

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


def srpo_on_hosts(root: Path, hosts: Path | None, updates: int) -> TrainToyConfig:
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
    model = new_policy(config)
    hold = Strikes.never if strikes is None else strikes.hold
    training = TrainingRun(
        config,
        training_starts(config),
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
        runner, name = parts.hosts.runner, self._victim.name

        def has(what: str) -> bool:
            return runner.metrics().get(f"hosts/{name}/{what}", 0.0) >= 1

        await until(lambda: has("episodes"))
        await until(lambda: has("episodes_running"))
        self._victim.kill()
        await until(lambda: name not in runner.hosts)
        await asyncio.to_thread(self._victim.start)
        await until(lambda: name in runner.hosts)
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
        "    setattr(time, name, lambda local_runner=here: here() + 7 * 86400.0)\n"
    )
    return {**os.environ, "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}


def test_a_run_whose_episodes_another_host_runs_learns_what_one_host_learns_whatever_its_clock(
    tmp_path: Path,
) -> None:
    remote = on_loopback("a", tmp_path / "keys", env=clocks_apart(tmp_path / "clocks"))
    try:
        hosts = start_and_list([remote], tmp_path)
        learnt = weights_after(srpo_on_hosts(tmp_path / "far", hosts, 2), agent=embodied_agent)
    finally:
        remote.kill()
    expected = weights_after(srpo_on_hosts(tmp_path / "here", None, 2), agent=embodied_agent)
    require_equal(learnt, expected)
    metrics = metrics_below(tmp_path / "far")
    assert [line["update"] for line in metrics] == [1, 2]
    assert metrics[-1]["hosts/a/episodes"] >= 1


# the test above has one host and no namespaces, tests/remote_rollout/test_host_runner.py the lost ones
@pytest.mark.proof
@pytest.mark.needs_root
@pytest.mark.timeout(580)
def test_a_run_on_two_hosts_one_killed_and_started_again_learns_what_one_host_learns(
    namespaces: tuple[NamespaceHost, ...], tmp_path: Path
) -> None:
    control, *others = namespaces
    remote = [
        ServedHost(name, f"{each.address}:7070", tmp_path / "keys", each.popen)
        for name, each in zip("ab", others, strict=True)
    ]
    hosts = start_and_list(remote, tmp_path)
    # sockets and threads of the run belong to the namespace from here on
    with control.entered():
        learnt = weights_after(srpo_on_hosts(tmp_path / "far", hosts, UPDATES), Strikes(remote[0]))
    for host in remote:
        host.kill()
    require_equal(learnt, weights_after(srpo_on_hosts(tmp_path / "here", None, UPDATES)))
    metrics = metrics_below(tmp_path / "far")
    assert len(metrics) == UPDATES
    assert metrics[-1]["rollout/lost/died"] >= 1


AGENT = partial(by_turns, first="left")
SMALL = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=128,
)


def team_on_hosts(root: Path, hosts: Path | None) -> TrainToyConfig:
    config = TrainToyConfig(
        run=RunConfig(name="pair", root=str(root), updates=3, device="cpu"),
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        cluster=ClusterConfig(hosts=None if hosts is None else str(hosts)),
        step_limit=20,
        num_starts=8,
    )
    return deterministic(config, num_envs=2)


def with_seed(config: TrainToyConfig, name: str) -> TrainToyConfig:
    seed = len(name)  # any, but not the same for both
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, seed=seed))


async def learnt(config: TrainToyConfig) -> list[torch.Tensor]:
    """Train a pair, of which one learns in each update; return the weights of both."""
    members = {name: Member(new_policy(with_seed(config, name))) for name in ("left", "right")}
    await train(config, training_starts(config), Team(members, updates_per_turn=1), agent=AGENT)
    return [
        weight.clone()
        for member in members.values()
        for weight in member.model.network.state_dict().values()
    ]


# test_hosts_run.py has one policy, and the test below one that asks the policy of each agent
@pytest.mark.proof
@pytest.mark.timeout(300)
async def test_two_policies_learn_on_another_host_what_they_learn_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    async with asyncio.timeout(250), loopback_hosts(tmp_path) as listed:
        remote = await learnt(team_on_hosts(tmp_path / "far", listed))
        local = await learnt(team_on_hosts(tmp_path / "here", None))
    assert all(torch.equal(*pair) for pair in zip(remote, local, strict=True))
    (run,) = (tmp_path / "far").iterdir()
    newest = read_metrics(run / "metrics.jsonl")[-1]
    assert newest["hosts/far1/episodes"] == 3 * 2 * 2
    assert {"left/hosts/weights_s", "right/hosts/weights_s"} <= newest.keys()


def decided(trajectory: Trajectory) -> list[tuple[str, bytes, bytes]]:
    return [
        (step.agent, step.chunk.tokens.tobytes(), step.chunk.log_probs.tobytes())
        for step in trajectory.steps
    ]


async def test_a_host_asks_the_policy_of_each_kind_of_episode(tmp_path: Path) -> None:
    toy = TrainToyConfig(env_id=REACH, step_limit=6)
    config = MixedTrainingConfig(
        run=RunConfig(device="cpu"),
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0, deterministic=True),
        group_size=2,
        simulators=SimulatorConfig(num_envs=1),
        text=TextPoolConfig(num_envs=1),
        chat=ChatLimits(max_turns=4, max_reply=6),
        engine=EngineConfig(is_deterministic=True, max_reply=6),
    )
    team = Team(
        {
            ROBOT: Member(new_policy(toy)),
            LANGUAGE: Member(tiny(SMALL, ["go on"], seed=0), engine=config.engine),
        }
    )
    starts = [
        TaskStart(env=env_spec(toy), task="reach", options={"init_state_id": 1}),
        TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=3),
    ]
    agent = mixed_agent(config.chat)
    episodes = [GroupSource([start], 1, seed=0).next_group().episodes[0] for start in starts]
    async with asyncio.timeout(200), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime())
        host = await runtime.spawn(RolloutHost, "far", 1 << 24, placement=InLoop())
        for name, member in team.members.items():
            member.model.save(tmp_path / name)
        for piece in read_pieces(tmp_path):
            await host.put_file(*piece)
        recipe = make_host_recipe(config, starts, team, agent)
        # as it travels
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=type(recipe))
        status = await host.open(sent)
        assert status.held.keys() == {ROBOT, LANGUAGE}
        remote = RolloutHostRunner(host, status)
        there = [
            decided(await remote.materialise(await remote.run_episode(episode)))
            for episode in episodes
        ]

        pool = await stack.enter_async_context(make_pool(config, runtime, starts))
        lane = await stack.enter_async_context(DeviceLane(1))
        engines = await stack.enter_async_context(make_engines(config, team, lane, 0))
        local = LocalEpisodeRunner(pool, engines, agent)
        assert there == [decided(await local.run_episode(episode)) for episode in episodes]
    assert [{agent for agent, _, _ in each} for each in there] == [{ROBOT}, {LANGUAGE}]


async def learnt_of_both_kinds(root: Path, hosts: Path | None) -> list[torch.Tensor]:
    """Train a robot and a language policy in one run; return the weights of both."""
    toy = TrainToyConfig(env_id=REACH, step_limit=6)
    config = MixedTrainingConfig(
        run=RunConfig(name="both", root=str(root), updates=2),
        reward=RewardConfig(function=REWARD),
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=4, max_staleness=0, deterministic=True),
        simulators=SimulatorConfig(num_envs=2),
        text=TextPoolConfig(num_envs=4),
        chat=ChatLimits(max_turns=4, max_reply=6),
        engine=EngineConfig(is_deterministic=True, max_reply=6),
        cluster=ClusterConfig(hosts=None if hosts is None else str(hosts)),
    )
    members = {ROBOT: Member(new_policy(toy)), LANGUAGE: Member(tiny(SMALL, ["go on"], seed=0))}
    starts = [
        start
        for number in range(4)
        for start in (
            TaskStart(env=env_spec(toy), task="reach", options={"init_state_id": number}),
            TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=number),
        )
    ]
    await train(config, starts, Team(members), agent=mixed_agent(config.chat))
    return [
        weight.clone()
        for member in members.values()
        for weight in member.model.network.state_dict().values()
    ]


# the test above has one engine and no update; test_host_takeover.py has a host with two engines
@pytest.mark.proof
@pytest.mark.timeout(580)
async def test_engines_of_a_host_share_simulators_and_conversations_and_learn_what_one_host_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    async with asyncio.timeout(550), loopback_hosts(tmp_path) as listed:
        # GPUs of which torch sees none, so that both engines act on the CPU
        gpu = '{ name = "none", memory_gib = 80 }'
        listed.write_text(f"{listed.read_text()}gpus = [{gpu}, {gpu}]\n")
        remote = await learnt_of_both_kinds(tmp_path / "far", listed)
        local = await learnt_of_both_kinds(tmp_path / "here", None)
    assert all(torch.equal(*pair) for pair in zip(remote, local, strict=True))
    (run,) = (tmp_path / "far").iterdir()
    newest = read_metrics(run / "metrics.jsonl")[-1]
    for engine in ("far1:0", "far1:1"):
        assert newest[f"hosts/{engine}/slots"] == 3
        assert newest[f"hosts/{engine}/simulators_decision_s"] > 0
        assert newest[f"hosts/{engine}/text_decision_s"] > 0


needs_ray = pytest.mark.skipif(
    # ray reads it when it is imported
    find_spec("ray") is None or os.environ.get("RAY_AUTH_MODE") != "token",
    reason="ray is not installed, or runs without a token: make test-ray",
)


def run_on_ray(root: Path, **ray: object) -> SrpoToyConfig:
    cluster = ClusterConfig(ray=RayConfig(**{"address": "local", **ray}))
    return msgspec.structs.replace(small_run(root), cluster=cluster)


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_run_starts_a_cluster_and_runs_its_episodes_there(tmp_path: Path) -> None:
    config = run_on_ray(tmp_path)
    training = TrainingRun(config, reach_starts(config), reach_policy(config), agent=embodied_agent)
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
    alone = await train_ranked(ranked_run(tmp_path / "alone", 1, updates=3))
    cluster = ClusterConfig(
        ray=RayConfig(address=ray_cluster.address, num_hosts=2, interface="lo", look_every_s=None),
        learners=("127.0.0.2", "127.0.0.3"),
        local_rollout=True,
        allow_unencrypted_ranks=True,
    )

    def strike(update: int) -> None:
        if update == 2:
            ray_cluster.remove_node(last, allow_graceful=False)

    shared = await train_ranked(
        ranked_run(tmp_path / "shared", 2, updates=3, cluster=cluster), strike
    )
    out = capsys.readouterr().out
    assert re.search(r"rank 1 of 2 on host '127.0.0.3' \(pid \d+\) is gone: .* update 1", out)
    assert re.search(
        r"the host '127.0.0.3', which has ranks, is away.* Restart 2 of .* update 1\n", out
    )
    assert update_numbers(shared) == pytest.approx(update_numbers(alone), rel=1e-4, abs=1e-6)
    assert await episode_counts(shared, 3) == await episode_counts(alone, 3)


async def test_a_dry_run_places_ranks_on_named_nodes(tmp_path: Path) -> None:
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    config = run_on_ray(tmp_path, address="10.0.0.1:6379", num_hosts=3, gpus_per_host=2)
    config = msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, learners=("10.0.0.2:0-1",)),
        learner=msgspec.structs.replace(config.learner, ranks=2),
        run=msgspec.structs.replace(config.run, device="cuda"),
    )
    _, shown = await plan_layout(config, footprint, Team.of(reach_policy(config)))
    assert re.search(r"10\.0\.0\.2 +0-1 +ranks 0-1 +- ", shown), shown
    assert re.search(r"node 0 +0-1 +- +engines 0-1", shown)


async def test_a_dry_run_shows_what_is_reserved_and_joins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    had_ray = "ray" in sys.modules  # of another test
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    config = run_on_ray(tmp_path, address="10.0.0.1:6379", num_hosts=2)
    _, shown = await plan_layout(config, footprint, Team.of(reach_policy(config)))
    assert "layout apart: 1 learner rank, 2 engines, 4 simulators on 3 hosts" in shown
    assert "the cluster itself is asked when the run starts" in shown
    print_plan(config, footprint, 0, 0)
    assert "10.0.0.1:6379" in capsys.readouterr().out
    assert ("ray" in sys.modules) == had_ray


def test_without_ray_the_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    if find_spec("ray") is not None:
        pytest.skip("ray is installed")
    config = run_on_ray(tmp_path)
    training = TrainingRun(config, reach_starts(config), reach_policy(config), agent=embodied_agent)
    run = RunDirectory.create(tmp_path, "small", config, {})
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(ConfigError, match=r"Ray is not installed.*pip install"),
    ):
        runner.run(training.execute(run))


def test_hosts_are_listed_or_found_by_ray() -> None:
    with pytest.raises(ConfigError, match=r"none beside ray\.address"):
        ClusterConfig(hosts="hosts.toml", ray=RayConfig(address="auto"))
    assert "num_hosts" in RayConfig().unused_options()
    assert RayConfig(address="auto").unused_options() == {}
    assert ClusterConfig(ray=RayConfig(address="auto")).has_hosts
