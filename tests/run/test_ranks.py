"""Runs whose learner has several ranks: here, on other hosts, with fewer of them after a loss."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host_cluster import ServedHost, on_loopback, start_and_list
from own_parts import StartsAsTheFileSays
from rich.console import Console
from small_episodes import mlp
from toy_runs import (
    Toy,
    deterministic,
    episode_counts,
    episode_counts as scheduler_records,
    ranked_run,
    small_run,
    train_ranked,
    update_numbers,
)

from benchmarks.hosts.namespaces import NamespacesRefused, network_namespaces
from vla_rl.actors import LastingForkServers, Runtime, make_keys
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.algorithms.losses import KlLossConfig
from vla_rl.cli.dry_run import print_plan
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, LearnerHostLost, RankFailed, RankNotStarted
from vla_rl.graph import NodeFailed
from vla_rl.learner import LearnerConfig, OptimizerConfig, load_checkpoint
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.learner.estimates.rank_memory import PolicySize, require_gpus
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes import srpo_toy, train_toy
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import SchedulerConfig, SchedulerState
from vla_rl.run.resuming import Restarts
from vla_rl.run.train import Outcome, train
from vla_rl.run.training_run import TrainingRun
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
                name="own_parts:fails_as_the_file_says", kl=KlLossConfig(coef=0.01)
            ),
        ),
    )


async def trained(config: TrainToyConfig | SrpoToyConfig, **options: Any) -> Outcome:
    recipe: Any = train_toy if isinstance(config, TrainToyConfig) else srpo_toy
    async with asyncio.timeout(200):
        return await train(
            config, recipe.training_starts(config), recipe.new_policy(config), **options
        )


def metrics_in(run: RunDirectory) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


async def records_after(run: RunDirectory, version: int) -> tuple[Any, Any]:
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
    plain = train_toy.new_policy(config)
    policy = StartsAsTheFileSays(plain.config, plain.network)
    async with asyncio.timeout(250):
        starts = train_toy.training_starts(config)
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
    assert await records_after(shared, 3) == await records_after(alone, 3)


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
    assert await records_after(shared, 3) == await records_after(alone, 3)
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
    other = Member(srpo_toy.new_policy(config), learner=alone)
    team = Team({"policy": Member(srpo_toy.new_policy(config)), "other": other})
    with pytest.raises(ConfigError, match="ranks is 1, expected 2, as for the other policies"):
        await train(config, srpo_toy.training_starts(config), team)


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
    for local_ranks, row in ((3, r"learner ranks +│ [0-9.]+ +│ +3 "), (0, None)):
        print_plan(config, footprint, size.weight_bytes, 0, out, size, num_local_ranks=local_ranks)
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


def failing_ranks(root: Path, num_ranks: int) -> TrainToyConfig:
    return ranked_run(root, num_ranks, updates=2, loss="own_parts:fails_as_the_file_says")


async def train_failing(config: TrainToyConfig) -> RunDirectory:
    plain = new_policy(config)
    policy = StartsAsTheFileSays(plain.config, plain.network)
    async with asyncio.timeout(250):
        return (await train(config, training_starts(config), policy)).run


async def require_same(found: RunDirectory, expected: RunDirectory) -> None:
    """Compare the updates, and the books after the last: counts and data cursor."""
    assert update_numbers(found) == pytest.approx(update_numbers(expected), rel=1e-4, abs=1e-6)
    assert await scheduler_records(found, 2) == await scheduler_records(expected, 2)


async def without_rank_1(
    root: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> RunDirectory:
    """A run whose rank 1 is killed in the second update, and cannot be started after that."""
    (root / "failures").write_text("-\nSIGKILL\n")
    (root / "starts").write_text("-\nRuntimeError\n")
    monkeypatch.setenv("FAILURES_FILE", str(root / "failures"))
    monkeypatch.setenv("STARTS_FILE", str(root / "starts"))
    return await train_failing(failing_ranks(root, num_ranks))


# test_sharded_training.py has a run whose rank is left out, of a policy with critic and reference
@pytest.mark.proof
async def test_a_rank_that_cannot_start_again_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await train_failing(failing_ranks(tmp_path, 1))
    shared = await without_rank_1(tmp_path, 2, monkeypatch)
    told = r"at its start, rank 1 of 2 failed: RuntimeError: the device is gone.* Restart 2 of at "
    told += "most 3: the run continues after update 1 with 1 instead of 2 --learner.ranks"
    assert re.search(told, capsys.readouterr().out)
    lines = [json.loads(line) for line in shared.metrics.read_text().splitlines()]
    assert [line["learner/restarts"] for line in lines] == [0.0, 2.0]
    await require_same(shared, alone)


@pytest.mark.proof
async def test_two_ranks_of_three_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await train_failing(failing_ranks(tmp_path, 1))
    shared = await without_rank_1(tmp_path, 3, monkeypatch)
    assert "2 learner ranks share the update" in capsys.readouterr().out
    await require_same(shared, alone)


def test_the_ranks_that_are_left_keep_their_settings_and_a_lost_gpu_is_left_out(
    tmp_path: Path,
) -> None:
    config = failing_ranks(tmp_path, 3)
    config = msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, shard="weights", offload=True)
    )
    own = msgspec.structs.replace(config.learner, epochs=2)
    team = Team({"a": Member(mlp(), learner=own), "b": Member(mlp())})
    restarts = Restarts.of(config, team)
    assert restarts.remaining(config, team) == (config, team)
    restarts.count(RankNotStarted("rank 0 is gone", 0), 0)
    left, policies = restarts.remaining(config, team)
    assert isinstance(policies, Team)
    assert policies.members["b"].learner is None
    for learner in (left.learner, policies.members["a"].learner):
        assert learner is not None
        assert (learner.ranks, learner.shard, learner.offload) == (2, "weights", True)
    restarts.count(RankNotStarted("rank 1 is gone", 1), 0)
    assert restarts.lost_gpus == {0, 2}  # the two ranks had the GPUs 1 and 2
    left, _ = restarts.remaining(config, team)
    assert (left.learner.ranks, left.learner.shard, left.learner.offload) == (1, "gradients", False)


def test_ranks_that_are_left_have_to_fit_the_gpus_that_are_left() -> None:
    size = PolicySize(num_trained=7_541_237_184, num_frozen=0, bytes_each=2)
    gpus, two = [80 << 30, 1 << 30, 80 << 30], LearnerConfig(ranks=2, shard="weights")
    require_gpus(two, gpus, size, lost={1})
    with pytest.raises(ConfigError, match=r"GPU 1 has 1.0 GiB, expected at least 56.2"):
        require_gpus(two, gpus, size)
    with pytest.raises(ConfigError, match="ranks is 2, but there are 1 GPUs") as refused:
        require_gpus(two, gpus, size, lost={0, 1})
    restarts = Restarts(3, num_ranks=3)
    assert restarts.explained(refused.value) is refused.value
    restarts.count(RankNotStarted("rank 1 is gone", 1), 0)
    told = restarts.explained(refused.value)
    assert isinstance(told, RankFailed)
    assert "cannot continue with 2 of its ranks: LearnerConfig.ranks is 2, but" in str(told)


# tests/learner/distributed/test_rank_hosts.py has the ranks, and the tests below the choice of hosts
@pytest.mark.proof
async def test_a_run_with_ranks_on_two_hosts_is_that_of_one_process_and_continues_without_a_lost_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = await train_ranked(ranked_run(tmp_path / "alone", 1, updates=3))
    learning, lost = (on_loopback(name, tmp_path / "keys") for name in ("a", "b"))
    try:
        cluster = ClusterConfig(
            hosts=str(start_and_list([learning, lost], tmp_path)),
            learners=("a", "b"),
            local_rollout=True,
            allow_unencrypted_ranks=True,
        )

        def strike(update: int) -> None:
            if update == 2:
                lost.kill()

        shared = await train_ranked(
            ranked_run(tmp_path / "shared", 2, updates=3, cluster=cluster), strike
        )
    finally:
        learning.kill()
    out = capsys.readouterr().out
    assert re.search(
        r"rank 1 of 2 on host 'b' \(pid \d+\) is gone: .* Restart 1 of .* update 1", out
    )
    assert re.search(r"the host 'b', which has ranks, is away.* Restart 2 of .* update 1\n", out)
    assert out.count("2 learner ranks share the update") == 2
    assert update_numbers(shared) == pytest.approx(update_numbers(alone), rel=1e-4, abs=1e-6)
    assert await episode_counts(shared, 3) == await episode_counts(alone, 3)


@pytest.mark.proof
@pytest.mark.needs_root
@pytest.mark.timeout(580)
def test_ranks_in_network_namespaces_talk_over_their_cable_and_continue_after_it_is_pulled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(network_namespaces(3))
        except NamespacesRefused as reason:
            pytest.skip(str(reason))
        control, *others = opened
        remote = [
            ServedHost(name, f"{each.address}:7070", tmp_path / "keys", each.popen)
            for name, each in zip(("learns", "acts"), others, strict=True)
        ]
        cluster = ClusterConfig(
            hosts=str(start_and_list(remote, tmp_path)),
            learners=("here", "learns"),
            allow_unencrypted_ranks=True,
        )

        def strike(update: int) -> None:
            if update == 2:
                others[0].pull_cable()

        with control.entered():
            config = ranked_run(tmp_path / "shared", 2, updates=3, cluster=cluster)
            shared = asyncio.run(train_ranked(config, strike))
            books = asyncio.run(episode_counts(shared, 3))
        for host in remote:
            host.kill()
    # later: threads of ZeroMQ stay in the namespace in which they began
    alone = asyncio.run(train_ranked(ranked_run(tmp_path / "alone", 1, updates=3)))
    out = capsys.readouterr().out
    assert re.search(r"rank 1 of 2 on host 'learns' \(pid \d+\) is gone: .* update 1", out)
    assert re.search(
        r"the host 'learns', which has ranks, is away.* Restart 2 of .* update 1\n", out
    )
    assert "episodes run on acts" in out
    assert update_numbers(shared) == pytest.approx(update_numbers(alone), rel=1e-4, abs=1e-6)
    assert books == asyncio.run(episode_counts(alone, 3))


def test_gpus_of_a_lost_host_are_left_out_and_ranks_on_cpus_move() -> None:
    cluster = ClusterConfig(
        hosts="hosts.toml", learners=("here", "a:0-1", "b"), allow_unencrypted_ranks=True
    )
    config = ranked_run(Path(), 6, updates=3, cluster=cluster)
    remote: Any = object()
    gpus = [("", 0), ("", 1), ("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    restarts = Restarts(9, num_ranks=6, group_size=2)
    restarts.assign(
        RankAssignments(
            tuple(
                RankAssignment(f"cuda:{gpu}", host, remote if host else None, gpu=gpu)
                for host, gpu in gpus
            )
        )
    )
    restarts.count(RankNotStarted("rank 1 failed", 1), 0)
    assert restarts.lost_devices == (("here", 0), ("here", 1))
    left, _ = restarts.remaining(config, new_policy(config))
    assert (left.learner.ranks, left.cluster.learners) == (4, cluster.learners)
    restarts.count(LearnerHostLost("the host 'b' is away", "b"), 0)
    left, _ = restarts.remaining(config, new_policy(config))
    assert (left.learner.ranks, left.cluster.learners) == (2, ("here", "a:0,1"))
    moved = Restarts(9, num_ranks=6)
    moved.assign(
        RankAssignments(
            tuple(RankAssignment("cpu", host, remote if host else None) for host, _ in gpus)
        )
    )
    moved.count(LearnerHostLost("the host 'a' is away", "a"), 0)
    left, _ = moved.remaining(config, new_policy(config))
    assert (left.learner.ranks, left.cluster.learners) == (6, ("here", "b"))
    only = msgspec.structs.replace(config, cluster=ClusterConfig(hosts="h", learners=("a",)))
    with pytest.raises(ConfigError, match=r"all hosts of cluster.learners 'a' are gone"):
        moved.remaining(only, new_policy(config))


def test_ranks_on_several_hosts_need_a_network_that_is_declared_as_trusted() -> None:
    with pytest.raises(
        ConfigError, match="allow_unencrypted_ranks is False, expected True with ranks"
    ):
        ClusterConfig(hosts="hosts.toml", learners=("here", "a"))
    ClusterConfig(hosts="hosts.toml", learners=("a:0-7",))
    with pytest.raises(ConfigError, match=r"learners is .* expected none without other hosts"):
        ClusterConfig(learners=("a",))


def test_hosts_that_learn_need_several_ranks(tmp_path: Path) -> None:
    make_keys(tmp_path)
    key = (tmp_path / "server.pub").read_text().strip()
    table = f'[[host]]\nname = "a"\naddress = "tcp://127.0.0.1:9"\npublic_key = "{key}"\n'
    (tmp_path / "hosts.toml").write_text(f'client_key = "client.key"\n{table}')
    cluster = ClusterConfig(hosts=str(tmp_path / "hosts.toml"), learners=("a",))
    config = ranked_run(tmp_path, 1, updates=3, cluster=cluster)
    with pytest.raises(ConfigError, match=r"learners is .* expected none with learner.ranks = 1"):
        TrainingRun(config, training_starts(config), new_policy(config))
