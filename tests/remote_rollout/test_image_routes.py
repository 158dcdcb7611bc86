"""Images go to the learner's ranks directly, unless something in the control process reads them."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import uvloop
from host_cluster import on_loopback, start_and_list
from processes import children_of
from toy_runs import ONE_HOST, deterministic, episode_counts, ranked_run, small_run, train_ranked

from vla_rl.actors import LastingForkServers, make_keys
from vla_rl.algorithms import EmbeddingConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.graph import Pipeline
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.pipelines.config import TextTrainingConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.pipelines.parts import Parts
from vla_rl.pipelines.registry import PIPELINES, with_pipeline
from vla_rl.recipes import train_toy
from vla_rl.recipes.srpo_toy import (
    SrpoToyConfig,
    new_policy as reach_policy,
    training_starts as reach_starts,
)
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import TaskStart
from vla_rl.run.training_run import TrainingRun
from vla_rl.types import EnvSpec

DIRECTLY = "images go from the hosts to the learner ranks directly"
THROUGH = "images go through this process: "


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    make_keys(tmp_path)
    key = (tmp_path / "server.pub").read_text().strip()
    table = f'[[host]]\nname = "a"\naddress = "tcp://127.0.0.1:9"\npublic_key = "{key}"\n'
    (tmp_path / "hosts.toml").write_text(f'client_key = "client.key"\n{table}')
    return tmp_path / "hosts.toml"


def way_of(
    hosts: Path,
    pipeline: str,
    num_ranks: int = 2,
    customise: Any = lambda same: same,
    **changes: Any,
) -> str:
    """Build a run, which opens nothing; return the way of its images."""
    config = TrainToyConfig(
        cluster=ClusterConfig(hosts=str(hosts)),
        env_id=REACH,
        embedding=EmbeddingConfig(encoder="state"),
    )
    config = with_pipeline(config, pipeline)
    learner = msgspec.structs.replace(config.learner, ranks=num_ranks)
    config = msgspec.structs.replace(config, learner=learner, **changes)
    return way(
        TrainingRun(config, training_starts(config), new_policy(config), customise=customise)
    )


def way(training: TrainingRun) -> str:
    rollout = training._parts.hosts
    assert rollout is not None
    assert rollout.images.has_image_caches == (rollout.image_route == DIRECTLY)
    return rollout.image_route


# nft needs a flow policy and off_policy a head, which the toy run of this file has not
@pytest.mark.parametrize("pipeline", sorted(set(PIPELINES) - {"nft", "off_policy"}))
def test_no_pipeline_of_ours_reads_images_in_the_control_process(
    pipeline: str, hosts: Path
) -> None:
    assert way_of(hosts, pipeline) == DIRECTLY


def test_hosts_whose_engines_are_processes_of_vllm_embed_what_they_hand_over(hosts: Path) -> None:
    assert way_of(hosts, "embodied_srpo", engine=EngineConfig(kind="vllm")) == DIRECTLY


def test_one_process_that_learns_gets_its_images_as_ever(hosts: Path) -> None:
    assert way_of(hosts, "embodied_grpo", num_ranks=1) == ""


def test_a_reward_of_ones_own_gets_the_images(hosts: Path) -> None:
    reward = RewardConfig(function="vla_rl.remote_rollout.episode_store:observed_bytes")
    expected = f"{THROUGH}the node 'reward' may read them"
    assert way_of(hosts, "embodied_grpo", reward=reward) == expected


async def look(episodes: Any) -> None:
    """A node of one's own."""


def test_a_node_of_ones_own_gets_the_images_whatever_their_name(hosts: Path) -> None:
    def looked_at(pipeline: Pipeline) -> Pipeline:
        return pipeline.add_node("look", look, reads={"episodes": "groups"})

    expected = f"{THROUGH}the node 'look' may read them"
    assert way_of(hosts, "grpo", customise=looked_at) == expected
    assert way_of(hosts, f"{__name__}:renamed") == expected


def renamed(parts: Parts) -> Pipeline:
    """A pipeline whose groups have another name."""
    pipeline = Pipeline("renamed", "other names", inputs="update")
    pipeline.add_node("rollout", parts.collect, reads="update", writes="seen")
    return pipeline.add_node("look", look, reads={"episodes": "seen"})


def test_conversations_are_compared_in_the_control_process(hosts: Path) -> None:
    config = TextTrainingConfig(
        cluster=ClusterConfig(hosts=str(hosts)), text=TextPoolConfig(num_envs=4)
    )
    learner = msgspec.structs.replace(config.learner, ranks=2)
    config = msgspec.structs.replace(config, learner=learner)
    shape = TinyConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        vocab_size=300,
        context_size=128,
    )
    starts = [TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=3)]
    training = TrainingRun(config, starts, tiny(shape, ["go on"], seed=0))
    assert way(training) == f"{THROUGH}those of conversations are compared here"


def config_of(
    root: Path, hosts: Path, learners: tuple[str, ...] = (), pipeline: str = "embodied_srpo"
) -> SrpoToyConfig:
    config = with_pipeline(deterministic(small_run(root), num_envs=2), pipeline)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, device="cpu"),
        learner=msgspec.structs.replace(config.learner, ranks=2),
        cluster=ClusterConfig(
            hosts=str(hosts), learners=learners, allow_unencrypted_ranks=bool(learners)
        ),
    )


async def look_at_images(groups: Any) -> None:
    """A node of one's own that may read images."""


def looked_at(pipeline: Pipeline) -> Pipeline:
    return pipeline.add_node("look", look_at_images, reads="groups")


def learnt_by(
    config: SrpoToyConfig, customise: Any = lambda pipeline: pipeline
) -> tuple[dict[str, torch.Tensor], RunDirectory]:
    """Run it; return what it has learnt."""
    model = reach_policy(config)
    training = TrainingRun(config, reach_starts(config), model, customise=customise)
    directory = RunDirectory.create(Path(config.run.root), config.run.name, config, {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(training.execute(directory))
    learnt = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    return learnt, directory


def require_same_either_way(
    folder: Path, hosts: Path, capsys: pytest.CaptureFixture[str], **settings: Any
) -> None:
    """Run with images past this process, and through it, and compare."""
    direct, run = learnt_by(config_of(folder / "direct", hosts, **settings))
    out = capsys.readouterr().out
    assert "episodes run on a; images go from the hosts to the learner ranks directly" in out
    local, local_run = learnt_by(config_of(folder / "here", hosts, **settings), looked_at)
    assert "through this process: the node 'look' may read them" in capsys.readouterr().out
    assert all(torch.equal(direct[name], local[name]) for name in local)
    last, local_last = read_metrics(run.metrics)[-1], read_metrics(local_run.metrics)[-1]
    assert last["hosts/image_bytes_local"] == 0
    assert last["hosts/image_bytes_cached"] == local_last["hosts/image_bytes_local"] > 0
    assert local_last["hosts/image_bytes_cached"] == 0
    # those of the direct run were made by the image cache
    names = sorted(path.name for path in run.videos.glob("*.mp4"))
    assert names == sorted(path.name for path in local_run.videos.glob("*.mp4")) != []


# its short form is the run below whose images are lost, and the films in test_image_cache.py
@pytest.mark.proof
@pytest.mark.timeout(580)
def test_a_run_whose_images_pass_this_process_by_learns_what_it_learns_with_them_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = on_loopback("a", tmp_path / "keys")
    try:
        require_same_either_way(tmp_path, start_and_list([remote], tmp_path), capsys)
    finally:
        remote.kill()


# the test above has ranks here alone, and test_image_cache.py images that are borrowed
@pytest.mark.proof
@pytest.mark.timeout(580)
def test_ranks_on_two_hosts_read_images_of_a_third_and_learn_what_they_learn_with_them_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = [on_loopback(name, tmp_path / "keys") for name in "ab"]
    try:
        require_same_either_way(
            tmp_path, start_and_list(remote, tmp_path), capsys, learners=("here", "b")
        )
    finally:
        for host in remote:
            host.kill()


@pytest.mark.proof
@pytest.mark.timeout(580)
def test_a_critic_on_ranks_values_images_that_pass_this_process_by_as_it_values_them_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = on_loopback("a", tmp_path / "keys")
    try:
        require_same_either_way(
            tmp_path, start_and_list([remote], tmp_path), capsys, pipeline="embodied_ppo"
        )
    finally:
        remote.kill()


def reaching(
    root: Path, num_ranks: int, cluster: ClusterConfig = ONE_HOST, updates: int = 3
) -> TrainToyConfig:
    """A run whose observations have images, of a policy that is there soon."""
    config = ranked_run(root, num_ranks, updates=updates, cluster=cluster)
    return msgspec.structs.replace(config, env_id=train_toy.REACH)


def decisions_of(run: RunDirectory) -> list[tuple[float, float]]:
    """Decisions and rewards of each update."""
    lines = read_metrics(run.metrics)
    return [(line["update/decisions"], line["reward/mean"]) for line in lines]


def caches() -> list[int]:
    """Processes of this one that hold images."""
    return [pid for pid in children_of(os.getpid()) if holds_images(pid)]


def holds_images(pid: int) -> bool:
    return any("vla_rl_images" in os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.asyncio(loop_scope="session")
async def test_a_run_whose_images_are_lost_before_their_update_continues_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lasting_servers: LastingForkServers
) -> None:
    remote = on_loopback("a", tmp_path / "keys")

    def strike(update: int) -> None:
        if update == 2:
            (pid,) = caches()
            os.kill(pid, signal.SIGKILL)

    try:
        cluster = ClusterConfig(hosts=str(start_and_list([remote], tmp_path)))
        config = reaching(tmp_path / "struck", 2, cluster, updates=2)
        struck = await train_ranked(config, strike, lasting_servers)
    finally:
        remote.kill()
    out = capsys.readouterr().out
    assert re.search(
        # a rank may have asked for them before the end of that process was known
        r"(the process that holds images for the learner ranks \(pid \d+\) is gone: SIGKILL"
        r"|rank . of 2 failed: .*the images at .* are gone.*)"
        r"\. Restart 1 of at most 3: the run continues after update 1\n",
        out,
    )
    alone_config = reaching(tmp_path / "alone", 1, updates=2)
    alone = await train_ranked(alone_config, fork_servers=lasting_servers)
    assert decisions_of(struck) == decisions_of(alone)
    assert await episode_counts(struck, 2) == await episode_counts(alone, 2)
    assert caches() == []


# tests/remote_rollout/test_host_runner.py has hosts that are lost before
@pytest.mark.proof
async def test_a_host_that_is_lost_once_its_images_are_beside_the_ranks_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, stays = (on_loopback(name, tmp_path / "keys") for name in "ab")

    def strike(update: int) -> None:
        if update == 2:
            lost.kill()

    try:
        cluster = ClusterConfig(hosts=str(start_and_list([lost, stays], tmp_path)))
        config = reaching(tmp_path / "struck", 2, cluster)
        struck = await train_ranked(config, strike)
    finally:
        stays.kill()
    assert "Restart" not in capsys.readouterr().out
    alone = await train_ranked(reaching(tmp_path / "alone", 1))
    assert decisions_of(struck) == decisions_of(alone)
    assert await episode_counts(struck, 3) == await episode_counts(alone, 3)
    assert all(line["hosts/image_bytes_local"] == 0 for line in read_metrics(struck.metrics))
