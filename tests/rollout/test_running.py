"""Episodes end together, with the first error."""

import asyncio

import pytest

from vla_rl.rollout.episode_tasks import RunningEpisodes


async def test_the_oldest_episode_is_cancelled_first_and_stays_counted() -> None:
    running, ends = RunningEpisodes(), []

    async def episode(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(number)

    await running.open()
    for number in (3, 1, 2):
        running.start(number, episode(number))
    await asyncio.sleep(0)
    running.stop()
    await running.leave(None, None, None)
    assert ends == [1, 2, 3]
    assert len(running) == 3  # in flight: a resume runs them again


async def test_later_errors_become_notes_on_the_first_and_nothing_starts_meanwhile() -> None:
    running, first, later = RunningEpisodes(), ValueError("first"), KeyError("later")
    await running.open()
    assert running.fails_the_run(first)
    assert not running.fails_the_run(later)
    assert not running.fails_the_run(first)
    assert first.__notes__ == ["another episode failed too: KeyError: 'later'"]
    assert not running.may_start
    running.stop()
    await running.leave(None, None, None)
    with pytest.raises(RuntimeError, match="no group will come") as error:
        running.require_running()
    assert error.value.__cause__ is first


def test_before_it_is_opened_no_group_will_come() -> None:
    with pytest.raises(RuntimeError, match="the scheduler is not open"):
        RunningEpisodes().require_running()
