"""A resumed run takes over the hosts that wait for it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from processes import processes_of_session
from toy_runs import evaluate_offline, start_recipe

from vla_rl.actors import RemoteHost, make_keys, read_keys
from vla_rl.actors.host import HostServer
from vla_rl.cluster import Gpu, Host, HostChange, HostResources, ThisHost
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutEvaluator, read_records
from vla_rl.learner import load_checkpoint
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.remote_rollout.host_control import HostRestarter, HostStarter
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.host_recipe import fixed_digest, make_host_recipe, run_key
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import GroupSource, SchedulerState, embodied_agent
from vla_rl.team.members import Team
from vla_rl.types import SOLE_MEMBER, EpisodeRef, EpisodeSpec, Trajectory


class OneHost(ThisHost):
    """This host and one that never leaves."""

    def __init__(self, placement: RemoteHost, num_gpus: int) -> None:
        super().__init__()
        gpus = tuple(Gpu(name="none", memory_bytes=1 << 20) for _ in range(num_gpus))
        resources = HostResources(num_cores=1, memory_bytes=1 << 30, gpus=gpus)
        self._remote_host = Host(name="far", resources=resources, placement=placement)

    def hosts(self) -> tuple[Host, ...]:
        return (*super().hosts(), self._remote_host)

    async def changes(self) -> AsyncIterator[HostChange]:
        await asyncio.get_running_loop().create_future()
        yield  # type: ignore[misc]


class Site:
    """A host server, and runs over it."""

    def __init__(self, root: Path) -> None:
        make_keys(root / "keys")
        self._server_keys = read_keys(root / "keys" / "server.key")
        self._client_keys = read_keys(root / "keys" / "client.key")
        self.config = TrainToyConfig(
            run=RunConfig(name="small", root=str(root), device="cpu"),
            simulators=SimulatorConfig(num_envs=1),
            cluster=ClusterConfig(hosts="hosts.toml"),
            step_limit=20,
            num_starts=8,
        )
        self.folder = RunDirectory.create(root, "small", self.config).path
        self.num_gpus = 0
        self._address = "tcp://127.0.0.1:1"

    @asynccontextmanager
    async def served(self) -> AsyncIterator[HostServer]:
        allowed = [self._client_keys.public]
        opened = HostServer("tcp://127.0.0.1:0", self._server_keys, allowed, lost_after_s=20.0)
        async with opened as server:
            self._address = server.address
            yield server

    def rollout(
        self,
        lane: DeviceLane,
        episode_refs: Sequence[EpisodeRef] = (),
        config: TrainToyConfig | None = None,
    ) -> HostFleet:
        """Return the control side of a run, or of its resume, which restored weights 3."""
        config = config or self.config
        model = new_policy(config)
        placement = RemoteHost(
            address=self._address,
            server_public_key=self._server_keys.public,
            client_keys=self._client_keys,
            lost_after_s=20.0,
        )
        recipe = make_host_recipe(config, training_starts(config), Team.of(model), embodied_agent)
        rollout = HostFleet(
            OneHost(placement, self.num_gpus),
            config,
            recipe,
            Team.of(model),
            lane,
            local_runner=None,
            weight_version=0,
            episode_refs=lambda: episode_refs,
        )
        rollout.belong_to(self.folder)
        return rollout


def lose(rollout: HostFleet) -> None:
    """Close the connections, as the kernel does for a process that is killed."""
    assert rollout._runtime._launchers is not None
    for connection in rollout._runtime._launchers._connections.values():
        connection.close()


def model_of(rollout: HostFleet) -> Any:
    return rollout._team.members[SOLE_MEMBER].model


def starter_of(rollout: HostFleet) -> HostStarter:
    """Return what would start the hosts of a rollout, which is not open."""
    return HostStarter(
        rollout._runtime,
        rollout._config,
        rollout._recipe,
        {},
        Path(),
        "",
        tuple,
        lambda: rollout.weights.has_newest,
    )


class Killed(Exception):
    """Stands for the end of the control process."""


async def no_host(restarter: HostRestarter) -> None:
    """Bring up nothing, as a process that is dead."""


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - the hosts of a run have no event
        await asyncio.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def run_one(site: Site, rollout: HostFleet, number: int) -> Trajectory:
    episode = GroupSource(training_starts(site.config), 4, seed=0).next_group().episodes[number]
    return await rollout.runner.run_episode(episode)


def held_out_of(site: Site) -> tuple[EpisodeSpec, ...]:
    """Greedy episodes from two starts."""
    source = GroupSource(training_starts(site.config), 1, seed=7, num_greedy=1)
    return tuple(source.next_group().episodes[0] for _ in range(2))


async def test_the_resume_gets_the_simulators_the_engine_and_the_episodes_it_needs(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(200), DeviceLane(1) as lane, site.served() as server:
        # the same run first loses its connection, as if a cable was pulled, then its life
        run = site.rollout(lane)
        await lane.run(run.weights.sinks[SOLE_MEMBER].apply_weights, model_of(run).network, 3)
        with contextlib.suppress(Killed):
            async with run:
                before = run.weights.hosts["far"]
                lose(run)
                await until(lambda: run.weights.hosts.get("far") not in (None, before))
                needed, forgotten = await run_one(site, run, 0), await run_one(site, run, 1)
                assert needed.episode_ref is not None
                assert forgotten.episode_ref is not None
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(HostRestarter, "_bring_up_late", no_host)
                    lose(run)
                    await until(lambda: server.num_waiting_processes == 1)
                    raise Killed
        resumed = site.rollout(lane, episode_refs=[needed.episode_ref])
        for parameter in model_of(resumed).network.parameters():
            parameter.data.mul_(1.1)  # update 3 was made again, and came out otherwise
        await lane.run(
            resumed.weights.sinks[SOLE_MEMBER].apply_weights, model_of(resumed).network, 3
        )
        async with resumed:
            assert (server.num_actors, server.num_waiting_processes) == (1, 0)
            assert resumed.runner.holds_arrays(needed)
            assert not resumed.runner.holds_arrays(forgotten)
            materialised = await resumed.runner.materialise(needed)
            assert materialised.episode_ref is None
            assert len(materialised.steps[0].chunk.tokens) > 0
            again = await run_one(site, resumed, 1)
            assert again.steps[0].chunk.weight_version == 3
            # held-out episodes run there too, and give the bits of an evaluation of the weights here
            episodes = held_out_of(site)
            evaluator = HeldOutEvaluator(episodes)
            await evaluator.evaluate_on_hosts(RunDirectory(site.folder), resumed.evaluators)
            await lane.run(model_of(resumed).save, tmp_path / "policy")
        records = read_records(site.folder / "held_out.jsonl")
        offline = await evaluate_offline(tmp_path / "policy", episodes, version=3)
        assert sorted(records, key=repr) == sorted(offline, key=repr)
    shown = capsys.readouterr().out
    for number in (0, 1):
        taken = (
            f"host far was taken over: 1 environments, its engine and {number} finished episodes"
        )
        assert shown.count(taken) == 1


async def test_each_gpu_of_a_host_has_an_engine_with_its_share_of_the_environments(
    site: Site,
) -> None:
    site.num_gpus = 2  # of which torch sees none, so both engines act on the CPU
    run = replace(site.config.run, device="auto")
    config = replace(site.config, run=run, simulators=SimulatorConfig(num_envs=3))
    async with asyncio.timeout(200), DeviceLane(1) as lane, site.served() as server:
        rollout = site.rollout(lane, config=config)
        async with rollout:
            assert sorted(rollout.runner.hosts) == ["far:0", "far:1"]
            slots = [rollout.metrics()[f"hosts/far:{number}/slots"] for number in (0, 1)]
            assert slots == [2.0, 1.0]
            episodes = GroupSource(training_starts(config), 3, seed=0).next_group().episodes
            await asyncio.gather(*map(rollout.runner.run_episode, episodes))
            assert server.num_actors == 2


def test_a_gpu_that_is_smaller_than_the_policy_is_refused_with_the_inequality(site: Site) -> None:
    site.num_gpus = 1
    rollout = site.rollout(
        DeviceLane(1),
        config=replace(
            site.config, run=replace(site.config.run, device="auto"), hidden=(1024, 1024)
        ),
    )
    with pytest.raises(
        ConfigError, match=r"GPU 0 \(none\) of host 'far' has 0\.0 GiB, expected >="
    ):
        rollout._engines.split(rollout._hosts.hosts()[1])


@pytest.mark.parametrize(
    ("recipe", "reason"), [("", "has failed since"), ("of another run", "has other settings")]
)
def test_a_process_that_cannot_go_on_is_left_with_the_reason(
    site: Site, recipe: str, reason: str
) -> None:
    assert reason in starter_of(site.rollout(DeviceLane(1))).misfit("far", recipe)


def test_before_the_first_checkpoint_hosts_start_anew(site: Site) -> None:
    rollout = site.rollout(DeviceLane(1))
    starter, digest = starter_of(rollout), rollout._recipe.recipe_digest
    assert "no weights have been saved" in starter.misfit("far", digest)
    rollout.weights.sinks[SOLE_MEMBER].apply_weights(model_of(rollout).network, 1)
    assert starter.misfit("far", digest) == ""


def test_a_run_has_one_key_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert run_key(tmp_path / "a") == run_key(tmp_path / "a") != run_key(tmp_path / "b")


def test_only_what_no_publication_changes_tells_two_policies_apart(site: Site) -> None:
    model, other = new_policy(site.config), new_policy(site.config)
    for parameter in other.network.parameters():
        parameter.data.mul_(1.1)
    assert fixed_digest(model) == fixed_digest(other)
    for each in (model, other):
        next(each.network.parameters()).requires_grad = False
    assert fixed_digest(model) != fixed_digest(other)


UPDATES = 6
WITHIN_S = 150


class RealHost:
    """`vla-rl host` in a process of its own, and the list that names it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        keys = folder / "keys"
        command = [sys.executable, "-m", "vla_rl.cli.host", "--keys", str(keys)]
        # a busy machine may hold up any thread for seconds; a closed connection is seen at once
        self.server = subprocess.Popen(
            [*command, "--bind", address, "--lost-after", "30"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line.startswith("serving"):
                break
        self.path = folder / "hosts.toml"
        self.path.write_text(
            f'client_key = "keys/client.key"\n[[host]]\nname = "far"\naddress = "{address}"\n'
            'public_key = "keys/server.pub"\nlost_after_s = 20.0\n'
        )

    def processes(self) -> set[int]:
        """Everything that the host has started, also what has lost its parent since."""
        return set(processes_of_session(self.server.pid)) - {self.server.pid}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RealHost]:
    opened = RealHost(tmp_path)
    try:
        yield opened
    finally:
        opened.server.terminate()
        opened.server.communicate(timeout=60)


def wait_until(what: str, is_true: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait for something that other processes do, while one of them lives."""
    end = time.monotonic() + WITHIN_S
    while not is_true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{what} did not come within {WITHIN_S} s"
        time.sleep(0.02)


def killed_run(root: Path, host: RealHost, *arguments: str) -> Path:
    """Kill a run after it has a checkpoint, while it makes the next update; return its folder."""
    run = start_recipe(
        root,
        *("--cluster.hosts", str(host.path), "--run.updates", str(UPDATES)),
        *("--run.checkpoint-every", "1", "--run.device", "cpu", *arguments),
    )
    try:
        wait_until("a checkpoint", lambda: list(root.glob("*/checkpoints/update-*2")), run)
        # a rollout host, its fork server and its simulators
        assert len(host.processes()) >= 3
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    (folder,) = root.iterdir()
    return folder


@pytest.mark.proof
@pytest.mark.timeout(500)
def test_a_resume_takes_over_the_hosts_of_a_run_that_was_killed(
    host: RealHost, tmp_path: Path
) -> None:
    held_out = ("--success-return", "10", "--held-out.starts", "3")
    folder = killed_run(tmp_path / "runs", host, *held_out)
    resumed = start_recipe(tmp_path / "runs", "--resume", str(folder))
    try:
        out, err = resumed.communicate(timeout=WITHIN_S)
    finally:
        resumed.kill()
    assert resumed.returncode == 0, err
    assert "host far was taken over: 2 environments, its engine and" in out

    # each update once, and each episode in one place
    updates = [line["update"] for line in read_metrics(folder / "metrics.jsonl")]
    assert updates == list(range(1, UPDATES + 1))
    newest = folder / "checkpoints" / f"update-{UPDATES:06}"
    state = asyncio.run(load_checkpoint(newest)).part("scheduler", SchedulerState)
    assert state.ledger.trained == UPDATES * 2 * 2  # groups of an update, and their members
    assert (folder / "hosts_key").stat().st_size > 32
    # held-out episodes ran before the kill and after the resume, on the host: none runs here
    records = read_records(folder / "held_out.jsonl")
    assert [record.weights for record in records] == [0] * 3 + [UPDATES] * 3
    # the run ended in order, so nothing waits for another resume
    wait_until("the end of all", lambda: not host.processes(), host.server)


# test_host_takeover.py and tests/actors/test_lost_host.py have hosts in this process
@pytest.mark.proof
@pytest.mark.timeout(500)
def test_hosts_that_no_resume_takes_over_end_everything(host: RealHost, tmp_path: Path) -> None:
    killed_run(tmp_path / "runs", host, "--cluster.resume-within-s", "0.5")
    wait_until("the end of all", lambda: not host.processes(), host.server)
