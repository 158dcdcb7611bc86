"""A run whose learner has two ranks, and the same run continued by one process."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_policies import StartsAsTheFileSays
from rich.console import Console
from small_worlds import mlp
from toy_runs import Toy, deterministic, small_run

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.algorithms.losses import KlLossConfig
from vla_rl.cli.plan import EpisodeFootprint, print_plan
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, RankFailed, RankNotStarted
from vla_rl.graph import NodeFailed
from vla_rl.learner import LearnerConfig, OptimizerConfig, load_checkpoint
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.estimates.rank_memory import PolicySize
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes import srpo_toy, train_toy
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import SchedulerConfig, SchedulerState
from vla_rl.run.resuming import Restarts
from vla_rl.run.train import Outcome, train
from vla_rl.team.members import Member, Team


def mlp_run(root: Path) -> TrainToyConfig:
    """As small as `small_run`; a rank of it saves 3 s of CPU time, as it imports no transformers."""
    return TrainToyConfig(
        run=RunConfig(name="small", root=str(root)),
        env_id=REACH,
        group_size=2,
        step_limit=16,
        num_starts=4,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0), micro_batch=512),
    )


def with_ranks(
    small: Toy, num_ranks: int, updates: int, checkpoint_every: int = 1, pipeline: str = "ppo"
) -> Toy:
    """PPO with a KL term: policy, critic and reference are on the ranks."""
    config = with_pipeline(deterministic(small, num_envs=2), pipeline)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(
            config.run,
            updates=updates,
            checkpoint_every=checkpoint_every,
            peak_tflops=0.1,
        ),
        learner=msgspec.structs.replace(
            config.learner,
            ranks=num_ranks,
            loss=PolicyLossConfig(
                name="own_losses:fails_as_the_file_says", kl=KlLossConfig(coef=0.01)
            ),
        ),
    )


async def trained(config: TrainToyConfig | SrpoToyConfig, **options: Any) -> Outcome:
    recipe: Any = train_toy if isinstance(config, TrainToyConfig) else srpo_toy
    async with asyncio.timeout(200):
        return await train(config, recipe.starts_of(config), recipe.policy_of(config), **options)


def metrics_in(run: RunDirectory) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


async def books_of(run: RunDirectory, version: int) -> tuple[Any, Any]:
    """What the scheduler of a run knows after an update: its counts, and its data cursor."""
    checkpoint = await load_checkpoint(run.checkpoints / f"update-{version:06d}")
    state = checkpoint.part("scheduler", SchedulerState)
    return state.ledger, state.source


@pytest.fixture(scope="module")
def told_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of files that say how ranks fail. Its place is in the environment before a server
    starts, as ranks have the environment of the server that forks them.
    """
    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FAILURES", "STARTS"):
            patch.setenv(f"{name}_FILE", str(folder / name))
        yield folder


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_that_dies_at_its_start_is_named(
    servers: LastingForkServers, told_by: Path
) -> None:
    (told_by / "STARTS").write_text("SIGKILL\n")
    plain = mlp()
    policy = StartsAsTheFileSays(plain.config, plain.network)
    async with (
        DeviceLane(1) as lane,
        Runtime(fork_servers=servers) as runtime,
        asyncio.timeout(200),
    ):
        learner = ShardedLearner(policy, runtime, lane, LearnerConfig(ranks=2))
        told = r"at its start, rank 1 of 2 \(pid \d+\) is gone: SIGKILL"
        with pytest.raises(RankNotStarted, match=told) as raised:
            await learner.__aenter__()
    assert raised.value.rank == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_whose_rank_is_killed_and_later_left_out_is_that_of_one_process(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    servers: LastingForkServers,
    told_by: Path,
) -> None:
    on_one = with_ranks(mlp_run(tmp_path / "alone"), 1, updates=3)
    alone = (await trained(on_one, fork_servers=servers)).run
    # a line for each update that is begun, and for each start: rank 1 is killed in the second
    # update and again in the third, and its third start fails
    for name, lines_of_file in {
        "FAILURES": "-\nSIGKILL\n" * 2,
        "STARTS": "-\n-\nRuntimeError\n",
    }.items():
        (told_by / name).write_text(lines_of_file)
    config = with_ranks(mlp_run(tmp_path / "shared"), 2, updates=3)
    plain = train_toy.policy_of(config)
    policy = StartsAsTheFileSays(plain.config, plain.network)
    async with asyncio.timeout(250):
        starts = train_toy.starts_of(config)
        shared = (await train(config, starts, policy, fork_servers=servers)).run
    out = capsys.readouterr().out
    assert "2 learner ranks share the update and the critic and the reference" in out
    assert re.search(r"rank 1 of 2 \(pid \d+\) is gone: SIGKILL.* Restart 1 of .* update 1", out)
    assert re.search(r"rank 1 of 2 \(pid \d+\) is gone: SIGKILL.* Restart 1 of .* update 2", out)
    told = r"at its start, rank 1 of 2 failed: RuntimeError: the device is gone.* Restart 2 of at "
    told += "most 3: the run continues after update 2 with 1 instead of 2 --learner.ranks"
    assert re.search(told, out)
    lines = metrics_in(shared)
    assert [line["learner/restarts"] for line in lines] == [0.0, 1.0, 3.0]
    on_ranks = lines[:2]
    assert all(line[f"rank/{rank}/mfu"] > 0.0 for line in on_ranks for rank in range(2))
    assert all(0.0 < line["ranks/communication_share"] < 1.0 for line in on_ranks)
    assert re.search(r"ranks wait \d+%, mostly for rank \d; communication \d+%", out)
    first, *_ = sorted(shared.path.glob("trace*.json"))
    trace = json.loads(first.read_text())
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"update", "rank 0", "rank 0, collectives", "rank 1", "rank 1, collectives"} <= names
    require_same_updates(shared, alone)
    assert await books_of(shared, 3) == await books_of(alone, 3)


@pytest.mark.proof
async def test_a_run_survives_ranks_that_die_fail_and_freeze_and_one_process_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_run(tmp_path)
    small = msgspec.structs.replace(small, run=msgspec.structs.replace(small.run, videos_every=99))
    configs = [
        with_ranks(small, num_ranks, 3, checkpoint_every=2, pipeline="embodied_ppo")
        for num_ranks in (1, 2)
    ]
    alone = (await trained(configs[0])).run
    failures = tmp_path / "failures"
    # a line for each update that is begun: the second twice in vain, then the third once
    failures.write_text("-\nSIGKILL\n-\nRuntimeError\n-\n-\nSIGSTOP\n")
    monkeypatch.setenv("FAILURES_FILE", str(failures))
    shared = (await trained(configs[1])).run
    told = [
        r"rank 1 of 2 \(pid \d+\) is gone: SIGKILL.* Restart 1 of .* after update 0",
        r"rank 1 of 2 failed: RuntimeError: the device is gone.* Restart 2 of .* update 0",
        r"rank 1 of 2 \(pid \d+\) is gone: .*stopped by a signal.* Restart 1 of .* update 2",
    ]
    lines = re.findall("rank 1 of 2.*", capsys.readouterr().out)
    assert all(re.search(*pair) for pair in zip(told, lines, strict=True))
    assert [line["learner/restarts"] for line in metrics_in(shared)] == [2.0, 2.0, 3.0]
    require_same_updates(shared, alone)
    assert await books_of(shared, 3) == await books_of(alone, 3)
    continued = msgspec.structs.replace(
        configs[0], run=msgspec.structs.replace(configs[0].run, updates=4)
    )
    await trained(continued, resume=RunDirectory.resume(shared.path))
    assert [line["update"] for line in metrics_in(shared)] == [1, 2, 3, 4]


def require_same_updates(found: RunDirectory, expected: RunDirectory) -> None:
    kept = ("update", "update/loss", "update/grad_norm", "update/tokens", "reward/success_rate")
    kept += ("critic/loss", "critic/grad_norm", "update/reference_kl")
    for one, two in zip(metrics_in(expected), metrics_in(found), strict=True):
        # the loss of an MLP's first step is the rounding of a sum that is zero
        assert {name: two[name] for name in kept} == pytest.approx(
            {name: one[name] for name in kept}, rel=1e-4, abs=1e-7
        )


def test_a_run_ends_after_too_many_restarts_without_a_new_checkpoint() -> None:
    restarts, gone = Restarts(2), RankFailed("rank 0 of 2 is gone")
    group = ExceptionGroup("", [NodeFailed("update", 3, "rank 0 of 2 is gone")])
    group.exceptions[0].__cause__ = gone
    for version in (3, 3, 4, 4):
        restarts.count(group, version)
    with pytest.raises(RankFailed, match=r"restarted 2 times .* newer than update 4.*--resume"):
        restarts.count(group, 4)
    assert restarts.num_restarts == 4
    with pytest.raises(ValueError, match="no rank"):
        restarts.count(ValueError("no rank"), 4)


async def test_policies_of_a_team_with_different_numbers_of_ranks_are_refused(
    tmp_path: Path,
) -> None:
    config = with_ranks(small_run(tmp_path), 2, updates=1, pipeline="embodied_ppo")
    alone = msgspec.structs.replace(config.learner, ranks=1)
    other = Member(srpo_toy.policy_of(config), learner=alone)
    team = Team({"policy": Member(srpo_toy.policy_of(config)), "other": other})
    with pytest.raises(ConfigError, match="ranks is 1, expected 2, as for the other policies"):
        await train(config, srpo_toy.starts_of(config), team)


async def test_a_dry_run_prints_the_memory_of_each_rank(tmp_path: Path) -> None:
    out = Console(record=True, width=200)
    footprint = EpisodeFootprint(
        what_runs="toy", simulator_mb=15, server_mb=60, chunk_bytes=100, num_chunks=3
    )
    size = PolicySize(num_trained=7_541_237_184, num_frozen=0, bytes_each=2)
    config = with_ranks(small_run(tmp_path), 8, updates=1, pipeline="embodied_ppo")
    print_plan(config, footprint, size.weight_bytes, 0, out, size)
    text = out.export_text()
    assert "learner ranks" in text
    assert "8 ranks, shard gradients" in text
    assert "7,541,237,184, 0" in text
    assert re.search(r"gradients, float32 +│ 28\.093", text)
    assert re.search(r"the reference policy +│ 14\.047", text)
    assert re.search(r"each rank +│ 66\.722", text)
    assert re.search(r"learner ranks +│ [0-9.]+ +│ +8 ", text)
    for ranks_here, row in ((3, r"learner ranks +│ [0-9.]+ +│ +3 "), (0, None)):
        print_plan(config, footprint, size.weight_bytes, 0, out, size, ranks_here=ranks_here)
        memory = out.export_text().partition("Memory estimate")[2].partition("8 ranks")[0]
        assert re.search(row, memory) if row else "learner ranks" not in memory
    pairs = msgspec.structs.replace(config.learner, tensor_parallel=2)
    in_pairs = msgspec.structs.replace(config, learner=pairs)
    print_plan(in_pairs, footprint, size.weight_bytes, 0, out, replace(size, num_cut=6_476_005_376))
    text = out.export_text()
    assert "8 ranks, shard gradients, tensor parallel 2" in text
    assert re.search(r"layers that 2 ranks share +│ 6,476,005,376", text)
    assert re.search(r"gradients, float32 +│ 16\.031", text)
    assert re.search(r"the reference policy +│ 8\.015", text)
