"""The source of groups: alike members, whole epochs, lost starts that come back, and cursors that
resume.
"""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import source, starts

from vla_rl.errors import ConfigError
from vla_rl.rollout import GroupSource, SourceState, TaskStart
from vla_rl.types import EnvSpec, Sampling


def test_members_of_a_group_start_alike_and_decide_differently() -> None:
    plan = GroupSource(starts(3), 4, seed=7, sampling=Sampling(temperature=1.6)).next_group()
    assert [episode.member for episode in plan.episodes] == [0, 1, 2, 3]
    assert [episode.episode_id for episode in plan.episodes] == [0, 1, 2, 3]
    alike = {
        (episode.task, episode.seed, episode.env.id, str(episode.options))
        for episode in plan.episodes
    }
    assert len(alike) == 1
    assert len({episode.policy_seed for episode in plan.episodes}) == 4
    assert all(episode.sampling.temperature == 1.6 for episode in plan.episodes)


def test_the_last_members_of_a_group_may_act_greedily_as_a_baseline() -> None:
    plan = GroupSource(
        starts(1), 3, seed=7, sampling=Sampling(temperature=1.6), num_greedy=1
    ).next_group()
    assert [episode.sampling.greedy for episode in plan.episodes] == [False, False, True]
    assert all(episode.sampling.temperature == 1.6 for episode in plan.episodes)


def test_after_n_epochs_every_start_was_given_out_n_times() -> None:
    groups = source(count=7)
    seen = Counter(groups.next_group().start_index for _ in range(21))
    assert seen == dict.fromkeys(range(7), 3)
    assert groups.epoch == 3


def test_epochs_are_shuffled_differently_and_the_same_for_the_same_seed() -> None:
    def two_epochs(seed: int) -> list[int]:
        groups = source(count=20, seed=seed)
        return [groups.next_group().start_index for _ in range(40)]

    assert two_epochs(1) == two_epochs(1)
    assert two_epochs(1) != two_epochs(2)
    assert two_epochs(1)[:20] != two_epochs(1)[20:]


def test_a_lost_start_comes_back_before_anything_else_every_time() -> None:
    groups = source(count=5)
    lost = groups.next_group()
    groups.next_group()
    groups.return_start(lost)
    again = groups.next_group()
    assert (again.start_index, again.group_id) == (lost.start_index, 2)
    groups.return_start(again)
    assert groups.next_group().start_index == lost.start_index
    rest = Counter(groups.next_group().start_index for _ in range(3))
    assert lost.start_index not in rest
    assert groups.epoch == 1


def test_a_restored_source_goes_on_where_it_was() -> None:
    groups = source(count=4)
    for _ in range(3):
        plan = groups.next_group()
    groups.return_start(plan)
    saved = msgspec.json.decode(msgspec.json.encode(groups.state()), type=SourceState)
    other = source(count=4)
    other.restore(saved)
    assert [other.next_group() for _ in range(10)] == [groups.next_group() for _ in range(10)]


def test_a_cursor_of_other_starts_is_refused() -> None:
    saved = source(count=4).state()
    with pytest.raises(ConfigError, match="it was saved with num_starts 4, now 5; starts_digest"):
        source(count=5).restore(saved)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (GroupSource(starts(4), 8, 0), "group_size 4, now 8. Resume"),
        (GroupSource(starts(4), 4, 0, num_greedy=1), "num_greedy 0, now 1. Resume"),
        (GroupSource(starts(4), 4, 1), "seed 0, now 1. Resume"),
        (GroupSource(starts(5)[1:], 4, 0), "starts_digest"),
        (GroupSource(starts(4), 4, 0, kinds=["a", "b", "a", "b"]), "starts_digest"),
    ],
)
def test_a_cursor_of_a_source_that_gives_out_other_groups_is_refused_and_the_difference_named(
    other: GroupSource, named: str
) -> None:
    saved = GroupSource(starts(4), 4, 0).state()
    with pytest.raises(
        ConfigError, match="hands out other groups than this run would: it was saved with " + named
    ):
        other.restore(saved)


def test_a_cursor_is_read_where_the_files_of_the_environment_have_moved() -> None:
    moved = [
        msgspec.structs.replace(start, env=EnvSpec(id="fake-v0", kwargs={"assets": "elsewhere"}))
        for start in starts(4)
    ]
    GroupSource(moved, 4, 0).restore(GroupSource(starts(4), 4, 0).state())


def test_a_cursor_that_was_saved_before_it_named_its_source_is_still_read() -> None:
    older = b'{"num_starts":4,"epoch":1,"position":2,"next_group_id":6,"returned":[[3,1]]}'
    groups = GroupSource(starts(4), 8, 5)
    groups.restore(msgspec.json.decode(older, type=SourceState))
    plan = groups.next_group()
    assert (plan.start_index, plan.group_id, groups.epoch) == (3, 6, 1)


def test_a_source_without_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are no starts"):
        GroupSource([], 4, 0)


def test_kinds_take_turns_as_evenly_as_their_numbers_allow() -> None:
    kinds = ["robot"] * 2 + ["text"] * 6
    mixed = GroupSource(starts(8), 1, seed=3, kinds=kinds)
    given = [mixed.next_group().start_index for _ in range(16)]
    assert ["robot" if start < 2 else "text" for start in given] == 4 * [
        "text",
        "robot",
        "text",
        "text",
    ]
    assert sorted(given[:8]) == sorted(given[8:]) == list(range(8))
    assert given[:8] != given[8:]  # each kind is shuffled


def test_kinds_that_do_not_fit_the_starts_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 kinds for 2 starts"):
        GroupSource(starts(2), 1, seed=0, kinds=["text"])


def test_a_cursor_tells_starts_apart_whatever_their_options_are() -> None:
    def of(options: dict[Any, Any]) -> GroupSource:
        start = TaskStart(env=EnvSpec(id="none"), task="none", options=options)
        return GroupSource([start], group_size=2, seed=0)

    long = np.arange(5000)
    other = long.copy()
    other[2500] = 0
    for mine, another in (
        ({"state": long}, {"state": other}),
        ({"by": {1: "a"}}, {"by": {1: "b"}}),
    ):
        of(mine).restore(of(mine).state())
        with pytest.raises(ConfigError, match="starts_digest"):
            of(mine).restore(of(another).state())
