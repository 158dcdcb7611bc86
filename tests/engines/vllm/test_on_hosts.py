"""Engine processes of vLLM on a host that runs the episodes of a run."""

import asyncio
from pathlib import Path

import pytest
from loopback_hosts import loopback_hosts
from small_policies import speaking_policy

from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.learning import LearnerConfig, OptimizerConfig
from vla_rl.observe import read_metrics
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart
from vla_rl.training.run import train
from vla_rl.types import EnvSpec

STARTS = [
    TaskStart(env=EnvSpec(id="digits_task:Digits"), task="digits", seed=seed) for seed in range(4)
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
        outcome = await train(config, STARTS, speaking_policy())
    lines = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[-1]["hosts/far1/episodes"] >= 3 * 2 * 4
    # no engine acts here, and what the far ones report is what the learner computes
    assert "engine/num_ready" not in lines[-1]
    gaps = [line["update/log_prob_gap_max"] for line in lines if "update/log_prob_gap_max" in line]
    assert gaps
    assert max(gaps) < 1e-4
