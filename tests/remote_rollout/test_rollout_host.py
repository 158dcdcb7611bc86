"""The actor on a host, in this loop: it builds all from files and plain values, and runs the episodes
that this process would run.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from disks import tmpfs
from toy_runs import deterministic, small_run

from vla_rl.actors import InLoop, Runtime
from vla_rl.algorithms import EmbeddingConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine, make_torch_engine
from vla_rl.env_workers import SimulatorPool
from vla_rl.envs.text import TextEnvPool, TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.learner.distributed.messages import read_observations
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.pipelines.embodied_srpo import embed_group
from vla_rl.recipes.srpo_toy import new_policy, training_starts
from vla_rl.remote_rollout.episode_store import observed_bytes
from vla_rl.remote_rollout.host_control import RolloutHostRunner
from vla_rl.remote_rollout.host_recipe import (
    HostStatus,
    make_host_recipe,
    read_pieces,
    save_encoder,
)
from vla_rl.remote_rollout.image_routes import ImageRoutes
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.remote_rollout.weight_publication import HostWeights
from vla_rl.remote_rollout.weight_sources import WeightHost
from vla_rl.rollout import (
    ChatLimits,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
    embodied_agent,
)
from vla_rl.run.train import default_agent
from vla_rl.team.members import Team
from vla_rl.types import SOLE_MEMBER, AgentNames, ArrayRef, EnvSpec, EpisodeSpec, Group, Trajectory

SMALL = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=128,
)


def figures(trajectory: Trajectory) -> list[bytes]:
    return [
        array.tobytes()
        for step in trajectory.steps
        for array in (
            step.observation["image"],
            step.chunk.actions,
            step.chunk.tokens,
            step.chunk.log_probs,
            step.rewards,
            np.array(step.chunk.weight_version),
        )
    ]


async def require_same_after(
    host: RolloutHost, status: HostStatus, episode: EpisodeSpec, materialised: Trajectory
) -> None:
    """Run an episode again, whose images go to an image cache, and compare it with the whole one."""
    async with ImageRoutes(1 << 24) as routes:
        host_runner = RolloutHostRunner(host, status, route=await routes.connect_host("far", host))
        remote = await host_runner.materialise(await host_runner.run_episode(episode))
        assert remote.cached_images is not None
        assert remote.embedding is not None
        assert materialised.embedding is not None
        assert np.array_equal(remote.embedding, materialised.embedding)
        refs = [step.observation["image"] for step in remote.steps]
        assert all(isinstance(ref, ArrayRef) for ref in refs)
        assert observed_bytes(remote) == 0
        assert remote.cached_images.num_bytes == observed_bytes(materialised)
        read = read_observations([step.observation for step in remote.steps])
        steps = tuple(
            msgspec.structs.replace(step, observation=seen)
            for step, seen in zip(remote.steps, read, strict=True)
        )
        assert [list(seen) for seen in read] == [
            list(step.observation) for step in materialised.steps
        ]
        assert figures(msgspec.structs.replace(remote, steps=steps)) == figures(materialised)
        routes.drop_images(remote.cached_images)
        await host_runner.materialise(
            await host_runner.run_episode(episode)
        )  # which takes the message along
        with pytest.raises(OSError, match="the process that held them has dropped them"):
            refs[0].read_array()


async def test_a_host_runs_the_episode_that_would_run_here_with_the_weights_that_were_sent(
    tmp_path: Path,
) -> None:
    config = deterministic(small_run(tmp_path), num_envs=1)
    model, newer, starts = new_policy(config), new_policy(config), training_starts(config)
    for parameter in newer.network.parameters():
        parameter.data.mul_(1.1)
    model.save(tmp_path / "policies" / SOLE_MEMBER)
    episode = GroupSource(starts, 1, seed=0).next_group().episodes[0]
    recipe = make_host_recipe(config, starts, Team.of(model), embodied_agent)
    # the run began with another tower than the policy's files have
    began_with = new_policy(config)
    for parameter in began_with.network.parameters():
        parameter.data.mul_(0.9)
    embedding = EmbeddingConfig(encoder="policy", num_frames=3)
    recipe = msgspec.structs.replace(recipe, embedding=embedding)

    async with asyncio.timeout(200), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime())
        lane = await stack.enter_async_context(DeviceLane(1))
        encoder = trajectory_encoder(embedding, began_with, lane)
        await lane.run(save_encoder, encoder, tmp_path / "policies")
        host = await runtime.spawn(RolloutHost, "far", 1 << 24, placement=InLoop())
        for piece in read_pieces(tmp_path / "policies"):
            await host.put_file(*piece)
        status = await host.open(recipe)
        assert (status.num_slots, status.weight_version) == (1, 0)
        host_runner = RolloutHostRunner(host, status)

        pool = await stack.enter_async_context(
            SimulatorPool(runtime, config.simulators, specs=[episode.env])
        )

        async def run_locally(policy: object, version: int) -> list[bytes]:
            settings = EngineConfig(is_deterministic=True)
            async with TorchActionEngine(policy, lane, settings, version) as engine:  # type: ignore[arg-type]
                return figures(
                    await LocalEpisodeRunner(pool, engine, embodied_agent).run_episode(episode)
                )

        metadata = await host_runner.run_episode(episode)
        assert metadata.episode_ref is not None
        assert metadata.steps[0].observation["image"] is None
        materialised = await host_runner.materialise(metadata)
        first = figures(materialised)
        assert first == await run_locally(model, 0)

        await require_same_after(host, status, episode, materialised)

        agent_names = AgentNames([SOLE_MEMBER])
        # a host embeds what it hands over, with the encoder of the run
        group = Group(group_id=0, trajectories=(materialised,), dispatch_version=0)
        assert materialised.embedding is not None
        (there,) = await embed_group(group, encoder)
        assert np.array_equal(materialised.embedding, there)
        bare = msgspec.structs.replace(materialised, embedding=None)
        (local,) = await encoder.embed([bare])
        assert np.array_equal(there, local)

        weights = HostWeights(
            agent_names, 0, lambda name, death: None, lambda version: None, lambda version: None
        )
        weights.hosts["far"] = WeightHost(host, "127.0.0.1")
        weights.open(lambda work, name: asyncio.create_task(work, name=name))
        await asyncio.to_thread(weights.sinks[SOLE_MEMBER].apply_weights, newer.network, 1)
        await weights.wait_applied()
        second = figures(await host_runner.materialise(await host_runner.run_episode(episode)))
        assert second == await run_locally(newer, 1)
        assert second != first
        assert host_runner.decisions(asyncio.get_running_loop().time()).num_decisions > 0


async def test_a_file_outside_of_the_policys_folder_is_refused() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        host = await runtime.spawn(RolloutHost, "far", 0, placement=InLoop())
        with pytest.raises(ValueError, match="outside of the policy's folder"):
            await host.put_file("../other", 0, np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match="has 0 bytes, and the piece begins at 5"):
            await host.put_file("model", 5, np.zeros(3, np.uint8))


@pytest.mark.needs_root
async def test_a_host_whose_disk_is_full_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tmpfs("1m") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        async with asyncio.timeout(60), Runtime() as runtime:
            host = await runtime.spawn(RolloutHost, "far", 0, placement=InLoop())
            with pytest.raises(ConfigError, match=r"host 'far' has no room .* TMPDIR on a larger"):
                await host.put_file("policy/model", 0, np.zeros(2 << 20, np.uint8))


async def test_conversations_run_on_a_host_too(tmp_path: Path) -> None:
    config = TextTrainingConfig(
        run=RunConfig(device="cpu"),
        text=TextPoolConfig(num_envs=2),
        chat=ChatLimits(max_turns=4, max_reply=6),
        engine=EngineConfig(is_deterministic=True, max_reply=6),
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0, deterministic=True),
    )
    starts = [TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=3)]
    model = tiny(SMALL, ["go on"], seed=0)
    model.save(tmp_path / "policies" / SOLE_MEMBER)
    agent = default_agent(config)
    episode = GroupSource(starts, 1, seed=0).next_group().episodes[0]
    async with asyncio.timeout(200), AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime())
        host = await runtime.spawn(RolloutHost, "far", 1 << 24, placement=InLoop())
        for piece in read_pieces(tmp_path / "policies"):
            await host.put_file(*piece)
        status = await host.open(make_host_recipe(config, starts, Team.of(model), agent))
        host_runner = RolloutHostRunner(host, status)
        there = await host_runner.materialise(await host_runner.run_episode(episode))

        pool = await stack.enter_async_context(TextEnvPool(config.text))
        lane = await stack.enter_async_context(DeviceLane(1))
        engine = await stack.enter_async_context(make_torch_engine(model, lane, config.engine))
        local = await LocalEpisodeRunner(pool, engine, agent).run_episode(episode)
    assert (there.stop_reason, there.info) == (local.stop_reason, local.info)
    assert len(there.steps) == len(local.steps)
    for remote_step, step in zip(there.steps, local.steps, strict=True):
        seen = remote_step.observation["prompt_tokens"], step.observation["prompt_tokens"]
        assert np.array_equal(*seen)
        assert np.array_equal(remote_step.chunk.tokens, step.chunk.tokens)
        assert np.array_equal(remote_step.chunk.log_probs, step.chunk.log_probs)
