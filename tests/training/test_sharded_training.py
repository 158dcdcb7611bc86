"""A run whose learner has two ranks, and the same run continued by one process."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from toy_runs import deterministic, small_run

from vla_rl.commands.plan import EpisodeFootprint, print_plan
from vla_rl.errors import ConfigError
from vla_rl.learning.rank_memory import PolicySize
from vla_rl.observe import RunDirectory
from vla_rl.recipes.srpo_toy import SrpoToyConfig, policy_of, starts_of
from vla_rl.training.run import Outcome, train
from vla_rl.training.team import Member, Team


def with_ranks(root: Path, num_ranks: int, updates: int) -> SrpoToyConfig:
    config = deterministic(small_run(root), num_envs=2)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, updates=updates, videos_every=99),
        learner=msgspec.structs.replace(config.learner, ranks=num_ranks),
    )


async def train_toy(config: SrpoToyConfig, **options: Any) -> Outcome:
    async with asyncio.timeout(200):
        return await train(config, starts_of(config), policy_of(config), **options)


def metrics_in(run: RunDirectory) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


async def test_a_run_on_two_ranks_is_that_of_one_process_which_can_continue_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = (await train_toy(with_ranks(tmp_path / "alone", 1, updates=2))).run
    shared = (await train_toy(with_ranks(tmp_path / "shared", 2, updates=2))).run
    assert "2 learner ranks share the update" in capsys.readouterr().out
    kept = ("update/loss", "update/grad_norm", "update/tokens")
    first, second = (
        [{name: line[name] for name in kept} for line in metrics_in(run)] for run in (alone, shared)
    )
    for one, two in zip(first, second, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    continued = with_ranks(tmp_path / "shared", 1, updates=3)
    await train_toy(continued, resume=RunDirectory.resume(shared.path))
    assert [line["update"] for line in metrics_in(shared)] == [1, 2, 3]


async def test_a_team_of_several_policies_with_ranks_is_refused(tmp_path: Path) -> None:
    config = with_ranks(tmp_path, 2, updates=1)
    team = Team({name: Member(policy_of(config)) for name in ("policy", "other")})
    with pytest.raises(ConfigError, match="ranks is 2, expected 1 in a team of several policies"):
        await train(config, starts_of(config), team)


async def test_a_dry_run_prints_the_memory_of_each_rank(tmp_path: Path) -> None:
    out = Console(record=True, width=200)
    footprint = EpisodeFootprint(
        what_runs="toy", simulator_mb=15, server_mb=60, chunk_bytes=100, num_chunks=3
    )
    size = PolicySize(num_trained=7_541_237_184, num_frozen=0, bytes_each=2)
    config = with_ranks(tmp_path, 8, updates=1)
    print_plan(config, footprint, size.weight_bytes, 0, out, size)
    text = out.export_text()
    assert "learner ranks" in text
    assert "8 ranks, shard gradients" in text
    assert "7,541,237,184, 0" in text
    assert re.search(r"gradients, float32 +│ 28\.093", text)
    assert re.search(r"each rank +│ 52\.675", text)
