"""Policies whose ranks and engines are on several hosts learn what they learn on one."""

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from loopback_hosts import loopback_hosts
from ranked_runs import ranked_run
from turn_agents import by_turns

from vla_rl.cluster.config import ClusterConfig
from vla_rl.recipes.train_toy import TrainToyConfig, policy_of, starts_of
from vla_rl.remote_rollout.weight_sources import MemberWeightSink
from vla_rl.reporting import read_metrics
from vla_rl.run.train import train
from vla_rl.team.members import Member, Team

AGENT = partial(by_turns, first="left")


async def learnt(config: TrainToyConfig) -> list[torch.Tensor]:
    """Train a pair, of which one learns in each update; return the weights of both."""
    members = {}
    for seed, name in enumerate(("left", "right")):
        run = msgspec.structs.replace(config.run, seed=seed)
        members[name] = Member(policy_of(msgspec.structs.replace(config, run=run)))
    await train(config, starts_of(config), Team(members, updates_per_turn=1), agent=AGENT)
    return [
        weight.clone()
        for member in members.values()
        for weight in member.model.network.state_dict().values()
    ]


# tests/run/test_rank_weights.py has the parts
@pytest.mark.proof
@pytest.mark.timeout(500)
async def test_a_pair_whose_ranks_give_their_weights_to_hosts_learns_what_it_learns_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    here = await learnt(ranked_run(tmp_path / "here", 2, updates=3))

    def refuse(*_: object) -> None:
        raise AssertionError("the weights go through this process")

    monkeypatch.setattr(MemberWeightSink, "adopt", refuse)
    async with asyncio.timeout(400), loopback_hosts(tmp_path, 2) as listed:
        # one rank of each policy here, and one on another host; the third acts
        cluster = ClusterConfig(
            hosts=str(listed), learners=("here", "far1"), allow_unencrypted_ranks=True
        )
        far = await learnt(ranked_run(tmp_path / "far", 2, updates=3, cluster=cluster))
    assert all(torch.equal(*pair) for pair in zip(far, here, strict=True))
    (run,) = (tmp_path / "far").iterdir()
    newest = read_metrics(run / "metrics.jsonl")[-1]
    assert newest["left/hosts/weights_s"] > 0.0
    assert newest["right/hosts/weights_s"] > 0.0
    assert newest["hosts/far2/episodes"] == 12
