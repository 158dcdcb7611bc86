"""A run goes on with the ranks that are left after one of them cannot be started again."""

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
from own_policies import StartsAsTheFileSays
from ranked_runs import books_of, numbers_of, ranked_run
from small_worlds import mlp

from vla_rl.errors import ConfigError, RankFailed, RankNotStarted
from vla_rl.learner import LearnerConfig
from vla_rl.learner.estimates.rank_memory import PolicySize, require_gpus
from vla_rl.recipes.train_toy import TrainToyConfig, policy_of, starts_of
from vla_rl.reporting import RunDirectory
from vla_rl.run.resuming import Restarts
from vla_rl.run.train import train
from vla_rl.team.members import Member, Team


def with_ranks(root: Path, num_ranks: int) -> TrainToyConfig:
    return ranked_run(root, num_ranks, updates=2, loss="own_losses:fails_as_the_file_says")


async def trained(config: TrainToyConfig) -> RunDirectory:
    plain = policy_of(config)
    policy = StartsAsTheFileSays(plain.config, plain.network)
    async with asyncio.timeout(250):
        return (await train(config, starts_of(config), policy)).run


async def require_same(found: RunDirectory, expected: RunDirectory) -> None:
    """Compare the updates, and the books after the last: counts and data cursor."""
    assert numbers_of(found) == pytest.approx(numbers_of(expected), rel=1e-4, abs=1e-6)
    assert await books_of(found, 2) == await books_of(expected, 2)


async def without_rank_1(
    root: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> RunDirectory:
    """A run whose rank 1 is killed in the second update, and cannot be started after that."""
    (root / "failures").write_text("-\nSIGKILL\n")
    (root / "starts").write_text("-\nRuntimeError\n")
    monkeypatch.setenv("FAILURES_FILE", str(root / "failures"))
    monkeypatch.setenv("STARTS_FILE", str(root / "starts"))
    return await trained(with_ranks(root, num_ranks))


# test_sharded_training.py has a run whose rank is left out, of a policy with critic and reference
@pytest.mark.proof
async def test_a_rank_that_cannot_start_again_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await trained(with_ranks(tmp_path, 1))
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
    alone = await trained(with_ranks(tmp_path, 1))
    shared = await without_rank_1(tmp_path, 3, monkeypatch)
    assert "2 learner ranks share the update" in capsys.readouterr().out
    await require_same(shared, alone)


def test_the_ranks_that_are_left_keep_their_settings_and_a_lost_gpu_is_left_out(
    tmp_path: Path,
) -> None:
    config = with_ranks(tmp_path, 3)
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
