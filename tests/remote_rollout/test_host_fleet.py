"""Hosts that run episodes are brought up, dropped when they are gone, and brought up again."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from own_parts import hesitant_agent
from toy_runs import small_run

import vla_rl.cli.dry_run
from vla_rl.actors import make_keys
from vla_rl.cli.dry_run import plan_layout, print_plan, rehearse_training
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.cluster import Host, HostChange, HostResources, ThisHost
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.pipelines.config import EmbodiedConfig, MixedTrainingConfig, TextTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig, new_policy, training_starts
from vla_rl.remote_rollout.host_control import RESTARTS, HostRestarter
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.remote_rollout.host_recipe import (
    PIECE_BYTES,
    EnvironmentShare,
    environment_kinds,
    make_host_recipe,
    read_pieces,
    with_environments,
)
from vla_rl.rollout import SchedulerConfig, embodied_agent
from vla_rl.run.parts import TrainingParts
from vla_rl.team.members import Team
from vla_rl.types import SOLE_MEMBER


def config_with(root: Path, **cluster: object) -> SrpoToyConfig:
    return msgspec.structs.replace(small_run(root), cluster=ClusterConfig(**cluster))


def listed(root: Path) -> Path:
    make_keys(root / "keys")
    path = root / "hosts.toml"
    tables = "".join(
        f'[[host]]\nname = "{name}"\naddress = "tcp://10.0.0.{number}:7070"\n'
        'public_key = "keys/server.pub"\n'
        for number, name in enumerate(("near", "far"), start=2)
    )
    path.write_text(f'client_key = "keys/client.key"\n{tables}')
    return path


def test_hosts_get_plain_settings_and_names(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    recipe = make_host_recipe(
        config, training_starts(config), Team.of(new_policy(config)), hesitant_agent
    )
    assert recipe.config_class == "vla_rl.pipelines.config:EmbodiedConfig"
    decoded = msgspec.json.decode(recipe.config, type=EmbodiedConfig)
    assert (decoded.simulators, decoded.engine) == (config.simulators, config.engine)
    assert recipe.agent.function == "own_parts:hesitant_agent"
    assert recipe.members[SOLE_MEMBER].policy_class.endswith(":OpenVlaOft")
    # two starts of one environment
    assert len(recipe.envs) == 1


def test_an_agent_that_hosts_cannot_import_is_refused(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    arguments = config, training_starts(config), Team.of(new_policy(config))
    for agent in (partial(embodied_agent, frames_every=[2].pop), lambda env, policy: None):
        with pytest.raises(ConfigError, match=r"cluster\.hosts needs parts that other hosts can"):
            make_host_recipe(*arguments, agent)  # type: ignore[arg-type]


async def test_a_dry_run_refuses_the_agent_that_the_run_would(tmp_path: Path) -> None:
    config = config_with(tmp_path, hosts=str(listed(tmp_path)))
    with pytest.raises(ConfigError, match=r"cluster\.hosts needs parts that other hosts can"):
        await rehearse_training(
            config,
            training_starts(config),
            new_policy(config),
            agent=lambda env, policy: None,  # type: ignore[arg-type, return-value]
        )


def test_recording_is_refused_with_hosts(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    run = msgspec.structs.replace(config.run, record_to=str(tmp_path / "data"))
    config = msgspec.structs.replace(config, run=run)
    with pytest.raises(ConfigError, match="record_to is"):
        make_host_recipe(
            config, training_starts(config), Team.of(new_policy(config)), embodied_agent
        )


def test_the_files_of_a_folder_come_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    large = np.arange(PIECE_BYTES + 5, dtype=np.uint8).tobytes()
    (tmp_path / "inner" / "large").write_bytes(large)
    (tmp_path / "empty").write_bytes(b"")
    found: dict[str, bytes] = {}
    for name, start, piece in read_pieces(tmp_path):
        assert start == len(found.get(name, b""))
        found[name] = found.get(name, b"") + piece.tobytes()
    assert found == {"empty": b"", "inner/large": large}


class NoHosts(ThisHost):
    """This host alone, which never changes; `changes` waits as those of a file do."""

    async def changes(self) -> AsyncIterator[HostChange]:
        await asyncio.get_running_loop().create_future()
        yield  # type: ignore[misc]


async def test_a_run_without_any_host_ends_with_an_error_that_says_what_to_do(
    tmp_path: Path,
) -> None:
    config = config_with(tmp_path, hosts="hosts.toml", alone_s=0.05)
    team = Team.of(new_policy(config))
    recipe = make_host_recipe(config, training_starts(config), team, embodied_agent)
    with pytest.raises(
        ConfigError, match=r"cluster\.alone_s=0\.05 s; start one with `vla-rl host`"
    ):
        async with (
            asyncio.timeout(60),
            DeviceLane(1) as lane,
            HostFleet(NoHosts(), config, recipe, team, lane, local_runner=None, weight_version=0),
        ):
            await asyncio.get_running_loop().create_future()


def test_a_dry_run_lists_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path, hosts=str(listed(tmp_path)), local_rollout=True)
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    print_plan(config, footprint, 0, 0)
    shown = capsys.readouterr().out
    for row in ("host near", "host far", "tcp://10.0.0.3:7070", "this host"):
        assert row in shown


async def test_a_dry_run_shows_the_layout_as_declared_if_hosts_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vla_rl.cli.dry_run, "ANSWER_WITHIN_S", 0.05)
    path = listed(tmp_path)
    path.write_text(path.read_text() + 'gpus = "0-1"\n')
    config = config_with(tmp_path, hosts=str(path))
    team = Team.of(new_policy(config))
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    _, shown = await plan_layout(config, footprint, team)
    assert "layout apart: 1 learner rank, 3 engines, 4 simulators on 3 hosts" in shown
    assert "  far        0-1   -       engines 1-2  2" in shown
    assert f"not every host answered, so this is what {path} declares:" in shown
    many = msgspec.structs.replace(config.simulators, num_envs=4)
    with pytest.raises(ConfigError, match=r"= 4 < num_envs = 8: 4 environments would never be"):
        await plan_layout(msgspec.structs.replace(config, simulators=many), footprint, team)
    path.write_text(path.read_text().replace("0-1", "0-7"))
    with pytest.raises(ConfigError, match=r"num_envs=2 < 8 engines on host 'far'"):
        await plan_layout(config, footprint, team)


def test_an_engine_of_several_gets_its_share_of_each_kind_of_environment() -> None:
    three = EnvironmentShare(num_envs=3)
    embodied = EmbodiedConfig(simulators=SimulatorConfig(num_envs=8))
    assert with_environments(embodied, three).num_envs == 3
    talking = TextTrainingConfig(text=TextPoolConfig(num_envs=8))
    assert with_environments(talking, three).num_envs == 3
    mixed = MixedTrainingConfig(
        simulators=SimulatorConfig(num_envs=4), text=TextPoolConfig(num_envs=6)
    )
    assert environment_kinds(mixed) == {"simulators": 4, "text": 6}
    some = EnvironmentShare(num_envs=3, kinds={"simulators": 1, "text": 2})
    shared = with_environments(mixed, some)
    assert environment_kinds(shared) == {"simulators": 1, "text": 2}


async def test_a_dry_run_shows_engines_that_share_simulators_and_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vla_rl.cli.dry_run, "ANSWER_WITHIN_S", 0.05)
    path = listed(tmp_path)
    path.write_text(path.read_text() + 'gpus = "0-3"\n')
    config = MixedTrainingConfig(
        simulators=SimulatorConfig(num_envs=4),
        text=TextPoolConfig(num_envs=6),
        cluster=ClusterConfig(hosts=str(path)),
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=20),
    )
    team = Team.of(new_policy(config_with(tmp_path)))
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    _, shown = await plan_layout(config, footprint, team)
    assert "  far        0-3   -       engines 1-4  10" in shown
    few = msgspec.structs.replace(config, text=TextPoolConfig(num_envs=3))
    with pytest.raises(ConfigError, match=r"text\.num_envs=3 < 4 engines on host 'far'"):
        await plan_layout(few, footprint, team)


def test_the_machine_that_learns_has_engines_only_if_something_asks_them(tmp_path: Path) -> None:
    path = str(listed(tmp_path))

    def has_engines(local_rollout: bool, local_evaluation: bool) -> bool:
        config = config_with(tmp_path, hosts=path, local_rollout=local_rollout)
        team = Team.of(new_policy(config))
        parts = TrainingParts(
            config,
            training_starts(config),
            team,
            agent=embodied_agent,
            local_evaluation=local_evaluation,
        )
        return parts.engine is not None

    assert not has_engines(local_rollout=False, local_evaluation=False)
    assert has_engines(local_rollout=True, local_evaluation=False)
    assert has_engines(local_rollout=False, local_evaluation=True)


def test_options_of_hosts_are_unread_without_hosts() -> None:
    of_learners = {"allow_unencrypted_ranks", "ranks_port"}
    options = {"local_rollout", "episode_store_gib", "alone_s", "resume_within_s"} | of_learners
    assert set(ClusterConfig().unused_options()) == options
    assert set(ClusterConfig(hosts="hosts.toml").unused_options()) == of_learners
    assert ClusterConfig(hosts="hosts.toml", learners=("a",)).unused_options() == {}


def test_a_run_imports_nothing_of_several_hosts_or_of_policies_that_it_has_not() -> None:
    probe = (
        "import sys, vla_rl.run.train, vla_rl.recipes.train_toy\n"
        "import vla_rl.learner.learner, vla_rl.learner.checkpoint.files, vla_rl.run.offline\n"
        "import vla_rl.models.flow.small_folder, vla_rl.models.steered.policy\n"
        "print([m for m in sys.modules if m.startswith(('vla_rl.remote_rollout',"
        "'vla_rl.cluster.listed_hosts', 'vla_rl.cluster.host_file', 'vla_rl.remote_rollout.host_runner',"
        "'vla_rl.remote_rollout.episode_store', 'vla_rl.learner.distributed', 'torch.distributed.fsdp',"
        "'timm', 'transformers', 'scipy'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


HOST = Host(name="far", resources=HostResources(num_cores=1, memory_bytes=1 << 30))
DEATH = ActorDied("host", 7, "killed by SIGKILL")


class Actor:
    """The process of a host; it stays until it dies."""

    def __init__(self) -> None:
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stay(self) -> None:
        await self.death


class Site:
    """A host, and what its keeper does to it; `errors` are raised by the first attempts at it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.actors = list(errors), list[Actor]()
        self.killed, self.num_gone = list[object](), 0
        self.is_up = asyncio.Event()
        bring_up: Any = self._bring_up
        self.restarter = HostRestarter(HOST, bring_up, self._gone, self._kill)

    async def _bring_up(self, host: Host) -> Actor:
        assert host is HOST
        if self.errors:
            raise self.errors.pop(0)
        self.actors.append(Actor())
        self.is_up.set()
        return self.actors[-1]

    async def _kill(self, actor: object) -> None:
        self.killed.append(actor)

    def _gone(self, name: str) -> None:
        assert name == HOST.name
        self.num_gone += 1


async def test_a_host_is_brought_up_again_until_it_has_died_too_often() -> None:
    site = Site()
    await site.restarter.begin()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(site.restarter.supervise())
        for _ in range(1 + RESTARTS.max_restarts):
            await site.is_up.wait()
            site.is_up.clear()
            site.actors[-1].death.set_exception(DEATH)
        await keeping
    assert len(site.actors) == 1 + RESTARTS.max_restarts
    assert site.num_gone == len(site.actors) + 1


async def test_a_host_whose_process_dies_at_the_start_is_tried_again() -> None:
    site = Site(DEATH, TimeoutError())
    await site.restarter.begin()
    async with asyncio.timeout(20):
        keeping = asyncio.create_task(site.restarter.supervise())
        await site.is_up.wait()
        keeping.cancel()
        await asyncio.wait([keeping])
    assert site.killed == site.actors


async def test_a_mistake_ends_the_start_of_a_run_and_later_only_leaves_the_host_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mistake = ConfigError("no such simulator")
    site = Site(mistake, mistake)
    with pytest.raises(ConfigError, match="no such simulator"):
        await site.restarter.begin()
    async with asyncio.timeout(20):
        await site.restarter.supervise()
    assert "host far is left alone until it joins again" in caplog.text
    assert (site.actors, site.num_gone, site.killed) == ([], 1, [])


async def test_a_host_that_leaves_loses_its_process() -> None:
    site = Site()
    await site.restarter.begin()
    keeping = asyncio.create_task(site.restarter.supervise())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert (site.killed, site.num_gone) == (site.actors, 1)
