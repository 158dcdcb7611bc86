"""The wait graph lists who waits for whom, as long as they do."""

import pytest

from vla_rl.actors.waits import (
    Wait,
    add_source,
    begin_wait,
    current_waits,
    end_wait,
    note_progress,
    progress_counts,
    remove_source,
    waiting,
)


def listed(*who: str) -> list[str]:
    return [wait.who for wait in current_waits() if wait.who in who]


def test_a_wait_is_listed_until_its_block_is_left_by_any_door() -> None:
    def wait_and_fail() -> None:
        with waiting("episode 12", on="env-3"):
            (wait,) = [each for each in current_waits() if each.who == "episode 12"]
            raise RuntimeError(wait.on)

    with pytest.raises(RuntimeError, match="env-3"):
        wait_and_fail()
    assert listed("episode 12") == []


def test_a_wait_that_is_no_block_ends_with_its_token_and_only_once() -> None:
    token = begin_wait("a", on="b")
    assert listed("a") == ["a"]
    end_wait(token)
    end_wait(token)
    assert listed("a") == []


def test_waits_of_a_source_are_listed_too_the_longest_first() -> None:
    source = add_source(lambda: [Wait("late", "x", 2.0), Wait("early", "x", 1.0)])
    try:
        assert listed("early", "late") == ["early", "late"]
    finally:
        remove_source(source)
    assert listed("early", "late") == []


def test_a_wait_is_described_in_one_line() -> None:
    assert Wait("episode 12", "env-3", 10.0).describe(14.2) == (
        "episode 12 waits for env-3 since 4.2 s"
    )


def test_progress_is_counted_by_its_name() -> None:
    before = progress_counts().get("tests of waits", 0)
    note_progress("tests of waits")
    note_progress("tests of waits", 3)
    assert progress_counts()["tests of waits"] == before + 4
