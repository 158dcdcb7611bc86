"""Errors that are handled apart can be told apart, and say what was wrong."""

import pytest

from vla_rl.errors import (
    ActorDied,
    ActorFrozen,
    AssetError,
    ContextOverflow,
    EnvError,
    PackageError,
    RankFailed,
    RankNotStarted,
)


def test_a_dead_actor_is_named_with_its_cause_and_its_last_words() -> None:
    error = ActorDied("sim", 12, "exit code 3", ["Traceback", "ValueError: no"])
    assert str(error) == (
        "actor 'sim' (pid 12) died: exit code 3; the end of its stderr:\n    Traceback\n    ValueError: no"
    )
    assert str(ActorFrozen("sim", 12, "SIGKILL")) == "actor 'sim' (pid 12) died: SIGKILL"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


RANK = RankNotStarted("rank 1 died", 1)


@pytest.mark.parametrize(
    "error",
    [
        RANK,
        caused(ValueError("node failed"), RANK),
        ExceptionGroup("several", [ValueError("other"), ExceptionGroup("inner", [RANK])]),
        caused(ValueError("outer"), caused(OSError("middle"), RANK)),
    ],
    ids=["itself", "cause", "group", "cause of a cause"],
)
def test_the_failure_of_a_rank_is_found_wherever_it_is(error: Exception) -> None:
    assert RankFailed.found_in(error) is RANK


def test_other_errors_hold_no_failure_of_a_rank() -> None:
    assert RankFailed.found_in(ExceptionGroup("several", [ValueError("other")])) is None


def test_errors_of_assets_and_packages_are_also_pythons_own() -> None:
    assert issubclass(AssetError, EnvError)
    assert issubclass(AssetError, FileNotFoundError)
    assert issubclass(PackageError, ImportError)


def test_a_prompt_without_room_says_both_numbers() -> None:
    error = ContextOverflow(300, 256)
    assert (error.num_tokens, error.context_size) == (300, 256)
    assert "the prompt has 300 tokens and the context 256" in str(error)
