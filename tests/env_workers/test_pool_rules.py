"""What a pool decides without its processes: its limits, the room for one more, who gets which
simulator, when one is replaced.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Never, cast

import pytest

import vla_rl
from vla_rl.env_workers import SimulatorConfig, process
from vla_rl.env_workers.pool_state import Assignment, Replacements, RestartBudget
from vla_rl.env_workers.process import SimulatorProcess, available_mb, holds_more_than, private_mb
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.types import EnvSpec


@pytest.mark.parametrize(
    ("num_envs", "per_process", "sizes"),
    [(3, 1, [1, 1, 1]), (16, 8, [8, 8]), (6, 4, [4, 2]), (3, 8, [3])],
)
def test_environments_fill_one_process_after_the_other(
    num_envs: int, per_process: int, sizes: list[int]
) -> None:
    assert SimulatorConfig(envs_per_process=per_process).split_envs(num_envs) == sizes


def test_without_devices_the_environment_is_as_configured() -> None:
    assert SimulatorConfig().get_environment(3) == {
        "OMP_NUM_THREADS": "1",
        "VLA_RL_PROCESS_INDEX": "3",
    }


POOL = """
import asyncio
from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, make_vec

async def main() -> None:
    async with Runtime() as runtime, SimulatorPool(runtime, SimulatorConfig(num_envs=16)):
        pass

try:
    {what}
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "what",
    [
        "asyncio.run(main())",
        pytest.param("make_vec('CartPole-v1', 16)", marks=pytest.mark.proof),
    ],
    ids=["pool", "vector env"],
)
@pytest.mark.parametrize(
    ("limit", "told"), [("-n 128", "`ulimit -n` is 128"), ("-v 4000000", "`ulimit -v` is 4000000")]
)
def test_sixteen_simulators_under_a_low_limit_end_in_one_line(
    what: str, limit: str, told: str
) -> None:
    command = [
        "sh",
        "-c",
        f'ulimit {limit} && exec "$0" -c "$1"',
        sys.executable,
        POOL.format(what=what),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(vla_rl.__file__).parent.parent)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"ConfigError {told}")
    assert "16 child processes need about" in ended.stdout
    assert ended.stdout.endswith("or take fewer processes (num_envs, or more envs_per_process).\n")


MIB = 2**20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group that uses 250 MiB, of which 44 are cached files and the like.

    Its test writes the limit.
    """
    monkeypatch.setattr("vla_rl.env_workers.process._CGROUP", tmp_path)
    sizes = {
        "anon": 190,
        "file": 45,  # what tmpfs holds of it cannot be given up
        "shmem": 5,
        "inactive_anon": 3,
        "inactive_file": 32,
        "active_file": 8,
        "slab_reclaimable": 4,
        "slab_unreclaimable": 2,
    }
    (tmp_path / "memory.stat").write_text(
        "".join(f"{name} {size * MIB}\n" for name, size in sizes.items())
    )
    (tmp_path / "memory.current").write_text(f"{250 * MIB}\n")
    return tmp_path


def test_a_control_group_has_what_its_limit_leaves_and_what_the_kernel_can_reclaim(
    cgroup: Path,
) -> None:
    (cgroup / "memory.max").write_text(f"{256 * MIB}\n")
    assert available_mb() == 6 + 32 + 8 + 4


@pytest.mark.parametrize("limit", ["max", str(2**60), None])
def test_without_a_limit_that_counts_it_is_what_the_machine_has(
    cgroup: Path, limit: str | None
) -> None:
    if limit is not None:
        (cgroup / "memory.max").write_text(limit)
    total = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 50 < available_mb() <= int(total.split()[1]) / 1024


def test_a_process_holds_more_than_a_limit_below_its_own_memory() -> None:
    own = private_mb(os.getpid())
    assert holds_more_than(os.getpid(), own / 2)
    assert not holds_more_than(os.getpid(), own * 100)


def test_shared_memory_does_not_count() -> None:
    pid = os.fork()
    if pid == 0:  # everything of the child is shared with this process, or nearly
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    try:
        limit = private_mb(pid) + 1.0
        assert not holds_more_than(pid, limit)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_the_pages_of_a_small_process_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> Never:
        raise AssertionError("counted")

    monkeypatch.setattr(process, "private_mb", refuse)
    assert not holds_more_than(os.getpid(), 1e6)
    with pytest.raises(AssertionError, match="counted"):
        holds_more_than(os.getpid(), 0.001)


def test_an_ended_process_holds_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not holds_more_than(pid, 0.0)


CUP = EnvSpec(id="kitchen-v0", kwargs={"task_id": 0})
KITCHEN = EnvSpec(id="kitchen-v0", kwargs={"task_id": 1})


def test_a_request_takes_the_simulator_that_already_holds_its_environment() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.offer_env("empty", None)
    table.offer_env("with door", KITCHEN)
    table.offer_env("with cup", CUP)
    assert table.request_env("episode", CUP) == "with cup"
    assert table.num_idle == 2


def test_an_empty_simulator_is_taken_before_one_that_holds_something_else() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.offer_env("with door", KITCHEN)
    table.offer_env("empty", None)
    assert table.request_env("episode", CUP) == "empty"
    assert table.request_env("episode", CUP) == "with door"
    assert table.request_env("episode", CUP) is None


def test_a_free_simulator_goes_to_the_oldest_request_that_fits() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    for name, spec in (("door 1", KITCHEN), ("cup 1", CUP), ("cup 2", CUP)):
        assert table.request_env(name, spec) is None
    assert table.offer_env("simulator", CUP) == "cup 1"
    assert table.offer_env("simulator", None) == "door 1"
    assert table.num_waiting == 1


def test_nobody_is_passed_over_more_often_than_patience_allows() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.request_env("door", KITCHEN)
    for number in range(5):
        table.request_env(f"cup {number}", CUP)
    assert [table.offer_env("simulator", CUP) for _ in range(4)] == [
        "cup 0",
        "cup 1",
        "door",
        "cup 2",
    ]


def test_a_withdrawn_request_is_never_served() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.request_env("gone", CUP)
    table.request_env("here", CUP)
    table.withdraw("gone")
    table.withdraw("unknown")
    assert table.offer_env("simulator", CUP) == "here"
    assert table.offer_env("simulator", CUP) is None


def test_all_requests_can_be_sent_away() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.request_env("a", CUP)
    table.request_env("b", KITCHEN)
    assert table.withdraw_all() == ["a", "b"]
    assert table.num_waiting == 0


class UsedProcess:
    """A process as far as the limits look at it."""

    name = "worn"

    def __init__(self, episodes: int = 0, mb: float = 0.0, death: ActorDied | None = None) -> None:
        self.num_episodes, self._mb, self.death = episodes, mb, death

    def is_alive(self) -> bool:
        return self.death is None

    def holds_more_than(self, limit_mb: float) -> bool:
        return self._mb > limit_mb

    def private_mb(self) -> float:
        return self._mb


def used_process(**state: Any) -> SimulatorProcess:
    return cast(SimulatorProcess, UsedProcess(**state))


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"episodes": 9, "mb": 100.0}, None),
        ({"episodes": 10, "mb": 100.0}, "recycle_after_episodes"),
        ({"mb": 100.5}, "rss_limit_mb"),
        ({"death": ActorDied("worn", 7, "it ended")}, "died"),
        ({"episodes": 10, "death": ActorFrozen("worn", 7, "it stands still")}, "frozen"),
    ],
)
def test_a_process_at_a_limit_is_replaced_and_the_cause_is_named(
    state: dict[str, Any], cause: str | None
) -> None:
    limits = Replacements(SimulatorConfig(recycle_after_episodes=10, rss_limit_mb=100))
    assert limits.find_cause(used_process(**state)) == cause


def test_without_limits_a_living_process_is_never_replaced() -> None:
    limits = Replacements(SimulatorConfig(recycle_after_episodes=None, rss_limit_mb=None))
    assert limits.find_cause(used_process(episodes=10**6, mb=1e6)) is None


def test_replacements_are_counted_by_cause_and_only_deaths_use_the_budget() -> None:
    limits = Replacements(SimulatorConfig(max_restarts=1, restart_window_s=10.0))
    death = ActorDied("worn", 7, "it ended")
    limits.mark_expired(used_process(), "rss_limit_mb")
    limits.mark_expired(used_process(), "rss_limit_mb")
    assert [limits.record_exit("died", death, now) for now in (0.0, 1.0)] == [True, False]
    assert limits.counts == {
        "died": 2,
        "frozen": 0,
        "recycle_after_episodes": 0,
        "rss_limit_mb": 2,
    }


def test_restarts_long_ago_do_not_count() -> None:
    budget = RestartBudget(max_restarts=2, window_s=10.0)
    assert [budget.spend(now) for now in (0.0, 1.0, 9.9)] == [True, True, False]
    assert [budget.spend(now) for now in (20.0, 21.0, 22.0)] == [True, True, False]
