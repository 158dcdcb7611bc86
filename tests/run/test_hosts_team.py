"""A run of several policies whose episodes run on another host learns what one host learns."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from loopback_hosts import loopback_hosts
from toy_runs import deterministic
from turn_agents import by_turns

from vla_rl.actors import InLoop, Runtime
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.pipelines.config import MixedTrainingConfig, RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.side_by_side import LANGUAGE, REWARD, ROBOT, play_either
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, env_of, policy_of, starts_of
from vla_rl.remote_rollout.host_control import RolloutHostRunner
from vla_rl.remote_rollout.host_recipe import make_host_recipe, read_pieces
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.reporting import read_metrics
from vla_rl.rollout import ChatLimits, GroupSource, LocalEpisodeRunner, SchedulerConfig, TaskStart
from vla_rl.run.train import train
from vla_rl.team.members import Member, Team, make_engines
from vla_rl.team.pools import make_pool
from vla_rl.types import EnvSpec, Trajectory

AGENT = partial(by_turns, first="left")
SMALL = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=128,
)


def config_of(root: Path, hosts: Path | None) -> TrainToyConfig:
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
    members = {name: Member(policy_of(with_seed(config, name))) for name in ("left", "right")}
    await train(config, starts_of(config), Team(members, updates_per_turn=1), agent=AGENT)
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
        far = await learnt(config_of(tmp_path / "far", listed))
        here = await learnt(config_of(tmp_path / "here", None))
    assert all(torch.equal(*pair) for pair in zip(far, here, strict=True))
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
            ROBOT: Member(policy_of(toy)),
            LANGUAGE: Member(tiny(SMALL, ["go on"], seed=0), engine=config.engine),
        }
    )
    starts = [
        TaskStart(env=env_of(toy), task="reach", options={"init_state_id": 1}),
        TaskStart(env=EnvSpec(id="digits_task:Digits"), task="digits", seed=3),
    ]
    agent = play_either(config.chat)
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
        far = RolloutHostRunner(host, status)
        there = [decided(await far.whole(await far.play(episode))) for episode in episodes]

        pool = await stack.enter_async_context(make_pool(config, runtime, starts))
        lane = await stack.enter_async_context(DeviceLane(1))
        engines = await stack.enter_async_context(make_engines(config, team, lane, 0))
        here = LocalEpisodeRunner(pool, engines, agent)
        assert there == [decided(await here.play(episode)) for episode in episodes]
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
    members = {ROBOT: Member(policy_of(toy)), LANGUAGE: Member(tiny(SMALL, ["go on"], seed=0))}
    starts = [
        start
        for number in range(4)
        for start in (
            TaskStart(env=env_of(toy), task="reach", options={"init_state_id": number}),
            TaskStart(env=EnvSpec(id="digits_task:Digits"), task="digits", seed=number),
        )
    ]
    await train(config, starts, Team(members), agent=play_either(config.chat))
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
        far = await learnt_of_both_kinds(tmp_path / "far", listed)
        here = await learnt_of_both_kinds(tmp_path / "here", None)
    assert all(torch.equal(*pair) for pair in zip(far, here, strict=True))
    (run,) = (tmp_path / "far").iterdir()
    newest = read_metrics(run / "metrics.jsonl")[-1]
    for engine in ("far1:0", "far1:1"):
        assert newest[f"hosts/{engine}/slots"] == 3
        assert newest[f"hosts/{engine}/simulators_decision_s"] > 0
        assert newest[f"hosts/{engine}/text_decision_s"] > 0
