"""A failed run reports one error, with its cause."""

import pytest

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.run.terminal import explain, only_error, raises_one_error


def test_equal_errors_of_nested_groups_are_one_and_counted() -> None:
    group = ExceptionGroup(
        "outer", [ValueError("same"), ExceptionGroup("inner", [ValueError("same")])]
    )
    error = only_error(group)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["1 more task failed in the same way"]


def test_different_errors_stay_together() -> None:
    group = ExceptionGroup("outer", [ValueError("one"), ValueError("two")])
    assert only_error(group) is group


def test_notes_of_a_group_are_kept() -> None:
    group = ExceptionGroup("outer", [ValueError("one")])
    group.add_note("the progress was saved")
    assert only_error(group).__notes__ == ["the progress was saved"]


async def test_a_decorated_run_raises_the_error_itself() -> None:
    @raises_one_error
    async def run() -> None:
        raise ExceptionGroup("tasks", [ConfigError("wrong")])

    with pytest.raises(ConfigError, match="wrong"):
        await run()


def test_our_errors_are_explained_by_their_words_and_cause() -> None:
    error = CheckpointError("it is damaged")
    error.add_note("a note")
    error.__cause__ = OSError("no such file")
    assert explain(error).splitlines() == [
        "error: CheckpointError: it is damaged",
        "a note",
        "because of: OSError: no such file",
    ]


def test_a_bug_is_explained_by_its_traceback() -> None:
    assert explain(KeyError("x")) == "KeyError: 'x'"
