"""A run whose learner ranks are on several hosts is that of one process, also if a host is lost."""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ranked_runs import books_of, numbers_of, ranked_run, trained
from served_hosts import ServedHost, listed, on_loopback

from benchmarks.hosts.namespaces import NamespacesRefused, network_namespaces
from vla_rl.actors import make_keys
from vla_rl.cluster.config import ClusterConfig
from vla_rl.errors import ConfigError, LearnerHostLost, RankNotStarted
from vla_rl.learner.distributed.rank_hosts import RankAssignment, RankAssignments
from vla_rl.recipes.train_toy import policy_of, starts_of
from vla_rl.run.resuming import Restarts
from vla_rl.run.training_run import TrainingRun


# tests/learner/test_ranks_on_hosts.py has the ranks, and the tests below the choice of hosts
@pytest.mark.proof
async def test_a_run_with_ranks_on_two_hosts_is_that_of_one_process_and_continues_without_a_lost_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = await trained(ranked_run(tmp_path / "alone", 1, updates=3))
    learning, lost = (on_loopback(name, tmp_path / "keys") for name in ("a", "b"))
    try:
        cluster = ClusterConfig(
            hosts=str(listed([learning, lost], tmp_path)),
            learners=("a", "b"),
            plays_here=True,
            allow_unencrypted_ranks=True,
        )

        def strike(update: int) -> None:
            if update == 2:
                lost.kill()

        shared = await trained(
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
    assert numbers_of(shared) == pytest.approx(numbers_of(alone), rel=1e-4, abs=1e-6)
    assert await books_of(shared, 3) == await books_of(alone, 3)


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
        far = [
            ServedHost(name, f"{each.address}:7070", tmp_path / "keys", each.popen)
            for name, each in zip(("learns", "acts"), others, strict=True)
        ]
        cluster = ClusterConfig(
            hosts=str(listed(far, tmp_path)),
            learners=("here", "learns"),
            allow_unencrypted_ranks=True,
        )

        def strike(update: int) -> None:
            if update == 2:
                others[0].pull_cable()

        with control.entered():
            config = ranked_run(tmp_path / "shared", 2, updates=3, cluster=cluster)
            shared = asyncio.run(trained(config, strike))
            books = asyncio.run(books_of(shared, 3))
        for host in far:
            host.kill()
    # later: threads of ZeroMQ stay in the namespace in which they began
    alone = asyncio.run(trained(ranked_run(tmp_path / "alone", 1, updates=3)))
    out = capsys.readouterr().out
    assert re.search(r"rank 1 of 2 on host 'learns' \(pid \d+\) is gone: .* update 1", out)
    assert re.search(
        r"the host 'learns', which has ranks, is away.* Restart 2 of .* update 1\n", out
    )
    assert "episodes run on acts" in out
    assert numbers_of(shared) == pytest.approx(numbers_of(alone), rel=1e-4, abs=1e-6)
    assert books == asyncio.run(books_of(alone, 3))


def test_gpus_of_a_lost_host_are_left_out_and_ranks_on_cpus_move() -> None:
    cluster = ClusterConfig(
        hosts="hosts.toml", learners=("here", "a:0-1", "b"), allow_unencrypted_ranks=True
    )
    config = ranked_run(Path(), 6, updates=3, cluster=cluster)
    far: Any = object()
    gpus = [("", 0), ("", 1), ("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    restarts = Restarts(9, num_ranks=6, group_size=2)
    restarts.sit(
        RankAssignments(
            tuple(
                RankAssignment(f"cuda:{gpu}", host, far if host else None, gpu=gpu)
                for host, gpu in gpus
            )
        )
    )
    restarts.count(RankNotStarted("rank 1 failed", 1), 0)
    assert restarts.lost_places == (("here", 0), ("here", 1))
    left, _ = restarts.remaining(config, policy_of(config))
    assert (left.learner.ranks, left.cluster.learners) == (4, cluster.learners)
    restarts.count(LearnerHostLost("the host 'b' is away", "b"), 0)
    left, _ = restarts.remaining(config, policy_of(config))
    assert (left.learner.ranks, left.cluster.learners) == (2, ("here", "a:0,1"))
    moved = Restarts(9, num_ranks=6)
    moved.sit(
        RankAssignments(
            tuple(RankAssignment("cpu", host, far if host else None) for host, _ in gpus)
        )
    )
    moved.count(LearnerHostLost("the host 'a' is away", "a"), 0)
    left, _ = moved.remaining(config, policy_of(config))
    assert (left.learner.ranks, left.cluster.learners) == (6, ("here", "b"))
    only = msgspec.structs.replace(config, cluster=ClusterConfig(hosts="h", learners=("a",)))
    with pytest.raises(ConfigError, match=r"all hosts of cluster.learners 'a' are gone"):
        moved.remaining(only, policy_of(config))


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
        TrainingRun(config, starts_of(config), policy_of(config))
