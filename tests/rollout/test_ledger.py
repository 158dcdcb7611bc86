"""Conservation: every dispatched episode is in exactly one place."""

import pytest

from vla_rl.errors import ConservationError
from vla_rl.rollout import EpisodeLedger


def booked() -> EpisodeLedger:
    """20 dispatched, 8 trained, 4 filtered, 2 dropped: 6 are somewhere."""
    ledger = EpisodeLedger()
    ledger.dispatch(20)
    ledger.train(8)
    ledger.filter(4)
    ledger.drop(2, "stale")
    return ledger


def test_episodes_that_add_up_pass() -> None:
    booked().check(in_flight=4, buffered=2)


def test_a_lost_episode_is_reported_with_the_whole_table() -> None:
    with pytest.raises(
        ConservationError, match="20 episodes were dispatched, 19 are accounted for"
    ) as caught:
        booked().check(in_flight=3, buffered=2)
    for row in ("trained", "filtered", "dropped (stale)", "in flight", "buffered"):
        assert row in str(caught.value)


def test_an_episode_held_twice_is_reported() -> None:
    with pytest.raises(ConservationError, match="21 are accounted for"):
        booked().check(in_flight=4, buffered=3)


def test_a_ledger_goes_on_from_its_state() -> None:
    EpisodeLedger(booked().state()).check(in_flight=6, buffered=0)
