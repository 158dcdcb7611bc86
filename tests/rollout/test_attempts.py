"""A lost episode is run again until it was lost too often, and the last loss says so."""

import pytest

from vla_rl.rollout.counts import MAX_HOST_LOSSES, Attempts
from vla_rl.rollout.episode_runner import EpisodeLost
from vla_rl.types import EnvSpec, EpisodeSpec


def lost(number: int = 0, *, with_host: bool = False) -> EpisodeLost:
    episode = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return EpisodeLost(episode, "died", "SIGKILL", with_host=with_host)


def test_the_last_attempt_is_not_followed_by_another() -> None:
    attempts = Attempts(3)
    assert [attempts.allow(lost()) for _ in range(2)] == [True, True]
    last = lost()
    assert not attempts.allow(last)
    assert last.__notes__ == ["that was the last of max_attempts=3"]


def test_losses_of_a_host_are_no_fault_of_its_episodes_until_there_are_many() -> None:
    attempts = Attempts(1)
    for _ in range(MAX_HOST_LOSSES - 1):
        assert attempts.allow(lost(with_host=True))
    last = lost(with_host=True)
    assert not attempts.allow(last)
    assert last.__notes__ == ["10 hosts were lost while they ran it, so it may be what ends them"]


def test_both_kinds_of_loss_are_counted_apart() -> None:
    attempts = Attempts(2)
    assert attempts.allow(lost())
    assert attempts.allow(lost(with_host=True))
    assert not attempts.allow(lost())


@pytest.mark.parametrize("with_host", [False, True])
def test_episodes_are_counted_apart_and_one_that_ended_is_forgotten(with_host: bool) -> None:
    attempts = Attempts(2)
    assert attempts.allow(lost(0, with_host=with_host))
    assert attempts.allow(lost(1, with_host=with_host))
    attempts.ended(0)
    attempts.ended(5)  # it was never lost
    assert attempts.allow(lost(0, with_host=with_host))
    assert attempts.allow(lost(1, with_host=with_host)) == with_host
