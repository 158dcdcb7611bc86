"""A run learns from replies of a server elsewhere, which gets the weights of every update."""

import functools
from pathlib import Path

import msgspec
from model_servers import SglangStandIn, same_weights, serving

from vla_rl.engines.server import ModelServerConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.models.language import CausalLanguageModel
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE, GrpoTextConfig, training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig, chat_agent
from vla_rl.run.train import train


async def test_a_run_learns_from_the_replies_of_a_server(tmp_path: Path) -> None:
    policy = CausalLanguageModel.load(ARITHMETIC_BASE)
    async with serving(SglangStandIn(CausalLanguageModel.load(ARITHMETIC_BASE))) as server:
        plain = GrpoTextConfig(
            run=RunConfig(name="remote", root=str(tmp_path), updates=2, device="cpu"),
            group_size=4,
            scheduler=SchedulerConfig(groups_per_update=4, max_staleness=1),
            num_validation=0,
            text=TextPoolConfig(num_envs=8),
        )
        remote = ModelServerConfig(urls=(server.url,), api="sglang", update_mode="interrupt")
        engine = msgspec.structs.replace(plain.engine, kind="remote", remote=remote)
        config = msgspec.structs.replace(plain, engine=engine)
        outcome = await train(
            config,
            training_starts(config),
            policy,
            agent=functools.partial(chat_agent, limits=config.chat),
        )
    assert len(server.loaded) == 3  # before the first update, and after each
    assert same_weights(server.policy, policy)
    assert not same_weights(server.policy, CausalLanguageModel.load(ARITHMETIC_BASE))
    lines = read_metrics(outcome.run.path / "metrics.jsonl")
    gap = "update/log_prob_gap_max"
    gaps = [line[gap] for line in lines if gap in line]  # not if no group of an update differs
    assert gaps
    assert max(gaps) < 1e-4
    assert lines[-1]["engine/num_ready"] == 1.0
