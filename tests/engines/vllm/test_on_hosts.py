"""Engine processes of vLLM on a host that runs the episodes of a run."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from host_cluster import loopback_hosts
from small_policies import completing_policy, moved
from toy_runs import small_run

from vla_rl.actors import InLoop, Runtime
from vla_rl.algorithms import EmbeddingConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.learner.distributed.messages import read_observations
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig, new_policy, training_starts
from vla_rl.remote_rollout.episode_store import observed_bytes
from vla_rl.remote_rollout.host_control import RolloutHostRunner
from vla_rl.remote_rollout.host_recipe import make_host_recipe, read_pieces, save_encoder
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.reporting import read_metrics
from vla_rl.rollout import ChatLimits, GroupSource, SchedulerConfig, TaskStart, embodied_agent
from vla_rl.run.train import train
from vla_rl.team.members import Team
from vla_rl.types import SOLE_MEMBER, EnvSpec, Trajectory

STARTS = [
    TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=seed)
    for seed in range(4)
]


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
async def test_a_host_starts_engine_processes_and_gives_them_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    async with asyncio.timeout(1100), loopback_hosts(tmp_path) as listed:
        config = TextTrainingConfig(
            run=RunConfig(name="far", root=str(tmp_path / "runs"), updates=3, device="cpu"),
            group_size=4,
            scheduler=SchedulerConfig(groups_per_update=2, max_staleness=1),
            text=TextPoolConfig(num_envs=4),
            chat=ChatLimits(max_turns=3, max_reply=6),
            engine=EngineConfig(kind="vllm", max_reply=6),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0)),
            cluster=ClusterConfig(hosts=str(listed)),
        )
        outcome = await train(config, STARTS, completing_policy())
    lines = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[-1]["hosts/far1/episodes"] >= 3 * 2 * 4
    # no engine acts here, and what the far ones report is what the learner computes
    assert "engine/num_ready" not in lines[-1]
    gaps = [line["update/log_prob_gap_max"] for line in lines if "update/log_prob_gap_max" in line]
    assert gaps
    assert max(gaps) < 1e-4


EMBEDDING = EmbeddingConfig(encoder="policy", num_frames=3)


def robot_run(root: Path, **changes: object) -> SrpoToyConfig:
    """A small run of SRPO whose episodes ask engine processes, and are compared by the policy's tower."""
    config = small_run(root)
    run = msgspec.structs.replace(config.run, device="cpu")
    engine = EngineConfig(kind="vllm")
    return msgspec.structs.replace(config, run=run, engine=engine, embedding=EMBEDDING, **changes)


def with_images(trajectory: Trajectory) -> Trajectory:
    """The same episode with the images that are in an image cache, and without an embedding."""
    seen = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    *before, final = read_observations(seen)
    steps = tuple(
        msgspec.structs.replace(step, observation=observation)
        for step, observation in zip(trajectory.steps, before, strict=True)
    )
    return msgspec.structs.replace(trajectory, steps=steps, final_observation=final, embedding=None)


# in the suite, test_recipes.py starts the same engine by the same function, test_rollout_host.py
# embeds what a host hands over, and test_image_needs.py has both in one run's settings
@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
async def test_a_host_embeds_what_it_hands_over_beside_its_engine_process(tmp_path: Path) -> None:
    config = robot_run(tmp_path, simulators=SimulatorConfig(num_envs=1))
    model, starts = new_policy(config), training_starts(config)
    episode = GroupSource(starts, 1, seed=0).next_group().episodes[0]
    recipe = make_host_recipe(config, starts, Team.of(model), embodied_agent)
    files = tmp_path / "policies"
    model.save(files / SOLE_MEMBER)
    async with asyncio.timeout(500), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime())
        lane = await stack.enter_async_context(DeviceLane(1))
        # the run began with another tower than the policy's files have
        encoder = trajectory_encoder(EMBEDDING, moved(model, 3), lane)
        await lane.run(save_encoder, encoder, files)
        host = await runtime.spawn(RolloutHost, "far", 1 << 24, placement=InLoop())
        for piece in read_pieces(files):
            await host.put_file(*piece)
        status = await host.open(msgspec.structs.replace(recipe, embedding=EMBEDDING))
        routes = await stack.enter_async_context(ImageRoutes(1 << 24))
        remote = RolloutHostRunner(host, status, route=await routes.connect_host("far", host))
        found = await remote.materialise(await remote.run_episode(episode))
        assert found.cached_images is not None
        assert observed_bytes(found) == 0
        assert found.embedding is not None
        (local,) = await encoder.embed([with_images(found)])
    assert np.array_equal(found.embedding, local)


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
async def test_images_of_engine_processes_go_to_the_ranks_past_the_control_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(1100), loopback_hosts(tmp_path) as listed:
        config = robot_run(tmp_path / "runs", cluster=ClusterConfig(hosts=str(listed)))
        learner = msgspec.structs.replace(config.learner, ranks=2)
        config = msgspec.structs.replace(config, learner=learner)
        outcome = await train(config, training_starts(config), new_policy(config))
    assert "images go from the hosts to the learner ranks directly" in capsys.readouterr().out
    lines = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in lines] == [1, 2]
    assert lines[-1]["hosts/image_bytes_local"] == 0 < lines[-1]["hosts/image_bytes_cached"]
    assert max(line["update/log_prob_gap_max"] for line in lines) < 1e-4
