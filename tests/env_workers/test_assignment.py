"""Episodes and simulators find each other: affinity first, but nobody starves."""

from vla_rl.env_workers.pool_state import Assignment
from vla_rl.types import EnvSpec

CUP = EnvSpec(id="kitchen-v0", kwargs={"task_id": 0})
DOOR = EnvSpec(id="kitchen-v0", kwargs={"task_id": 1})


def test_a_request_takes_the_simulator_that_already_holds_its_environment() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.offer_env("empty", None)
    table.offer_env("with door", DOOR)
    table.offer_env("with cup", CUP)
    assert table.request_env("episode", CUP) == "with cup"
    assert table.num_idle == 2


def test_an_empty_simulator_is_taken_before_one_that_holds_something_else() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.offer_env("with door", DOOR)
    table.offer_env("empty", None)
    assert table.request_env("episode", CUP) == "empty"
    assert table.request_env("episode", CUP) == "with door"
    assert table.request_env("episode", CUP) is None


def test_a_free_simulator_goes_to_the_oldest_request_that_fits() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    for name, spec in (("door 1", DOOR), ("cup 1", CUP), ("cup 2", CUP)):
        assert table.request_env(name, spec) is None
    assert table.offer_env("simulator", CUP) == "cup 1"
    assert table.offer_env("simulator", None) == "door 1"
    assert table.num_waiting == 1


def test_nobody_is_passed_over_more_often_than_patience_allows() -> None:
    table: Assignment[str, str] = Assignment(patience=2)
    table.request_env("door", DOOR)
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
    table.request_env("b", DOOR)
    assert table.withdraw_all() == ["a", "b"]
    assert table.num_waiting == 0
