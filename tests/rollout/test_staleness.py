"""The staleness policy: both bounds on any schedule, whole groups for each update, and none that waits for ever."""

import pytest
from hypothesis import given, settings, strategies as st
from rollout_fakes import group_of

from vla_rl.errors import ConfigError
from vla_rl.rollout import SchedulerConfig
from vla_rl.rollout.staleness import Handover, StalenessPolicy


def admit(policy: StalenessPolicy, count: int) -> None:
    """Admit groups with the next ids.

    Ids are counted over the life of the policy by the caller's list.
    """
    for group_id in range(policy.num_outstanding, policy.num_outstanding + count):
        assert policy.can_admit(policy.version)
        policy.admit(group_id, policy.version)


def test_synchronous_training_admits_the_groups_of_one_update_and_no_more() -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_update=2)
    admit(policy, 2)
    assert not policy.can_admit(policy.version)
    policy.complete(1)
    policy.complete(0)
    assert (policy.select(), policy.select()) == (0, 1)
    assert not policy.can_admit(policy.version)
    policy.remove_trained([0, 1])
    assert policy.can_admit(policy.version)
    policy.admit(2, policy.version)
    assert policy.dispatch_version(2) == 1


def test_generation_runs_ahead_by_max_staleness_updates() -> None:
    policy = StalenessPolicy(max_staleness=2, groups_per_update=4)
    admit(policy, 12)  # (2 + 0 + 1) * 4
    assert not policy.can_admit(policy.version)


def test_a_filtered_group_gives_its_capacity_back_at_once() -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_update=1)
    policy.admit(0, policy.version)
    assert not policy.can_admit(policy.version)
    policy.remove_filtered(0)
    assert policy.can_admit(policy.version)


def test_an_update_waits_for_an_old_group_that_could_not_be_trained_later() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_update=1)
    policy.admit(0, policy.version)  # version 0, due in update 1
    policy.admit(1, policy.version)
    policy.complete(1)
    assert policy.select() == 1  # update 0 takes the newer one: update 1 is still there for group 0
    policy.remove_trained([1])
    policy.admit(2, policy.version)  # version 1, due in update 2
    policy.complete(2)
    assert policy.select() is None  # update 1 is the last one for group 0, still running
    policy.complete(0)
    assert policy.select() == 0
    policy.remove_trained([0])
    assert policy.select() == 2


def test_the_earliest_dispatched_of_the_complete_groups_goes_first() -> None:
    policy = StalenessPolicy(max_staleness=3, groups_per_update=1)
    admit(policy, 3)
    for group_id in (2, 1):
        policy.complete(group_id)
    assert (policy.select(), policy.select()) == (1, 2)


def test_in_order_the_lowest_group_is_waited_for() -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_update=3, in_order=True)
    admit(policy, 3)
    policy.complete(2)
    policy.complete(1)
    assert policy.select() is None
    policy.remove_filtered(0)
    assert (policy.select(), policy.select()) == (1, 2)


def test_only_what_no_schedule_can_train_in_time_is_evicted() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_update=2, version=5)
    for group_id, dispatch_version in enumerate([3, 4, 4, 4, 5]):
        policy.admit(group_id, dispatch_version)
        policy.complete(group_id)
    # Update 5 is the last one for version 4 and takes two of the three; version 3 was due in update
    # 4.
    assert policy.evict() == [0, 3]
    assert (policy.select(), policy.select(), policy.select()) == (1, 2, 4)


def test_the_policy_names_the_oldest_group_that_still_runs() -> None:
    policy = StalenessPolicy(max_staleness=3, groups_per_update=1)
    for group_id in range(4):
        policy.admit(group_id, policy.version)
    assert (policy.oldest_running(), policy.num_running) == (0, 4)
    policy.complete(1)
    policy.complete(0)
    assert (policy.oldest_running(), policy.num_running) == (2, 2)
    policy.remove_filtered(2)
    assert (policy.oldest_running(), policy.num_running) == (3, 1)
    policy.complete(3)
    assert (policy.oldest_running(), policy.num_running) == (None, 0)


def test_while_engines_serve_an_older_version_less_may_be_dispatched() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_update=2, version=3)
    for group_id in (0, 1):
        assert policy.can_admit(2)
        policy.admit(group_id, 2)
    # they are trained at version 3; a third group would be trained at 4, two updates after its own
    assert not policy.can_admit(2)
    assert policy.can_admit(3)


class Schedule:
    """A run of the policy under a sequence of random choices, with the bounds checked at every
    turn.
    """

    def __init__(self, policy: StalenessPolicy) -> None:
        self.policy = policy
        self.served_version = policy.version
        self.next_id = self.num_trained = 0
        self.in_flight: list[int] = []
        self.complete: set[int] = set()
        self.selected: list[int] = []

    def publish(self) -> None:
        self.served_version = self.policy.version

    def admit(self) -> None:
        size = self.policy.groups_per_update
        outstanding = len(self.in_flight) + len(self.complete) + len(self.selected)
        assert outstanding == self.policy.num_outstanding
        if self.policy.can_admit(self.served_version):
            bound = (self.policy.max_staleness + self.served_version + 1) * size
            assert outstanding + self.num_trained < bound
            self.policy.admit(self.next_id, self.served_version)
            self.in_flight.append(self.next_id)
            self.next_id += 1

    def finish(self, choice: int, *, kept: bool) -> None:
        if self.in_flight:
            group_id = self.in_flight.pop(choice % len(self.in_flight))
            if kept:
                self.policy.complete(group_id)
                self.complete.add(group_id)
            else:
                self.policy.remove_filtered(group_id)

    def select(self) -> None:
        group_id = self.policy.select()
        if group_id is not None:
            self.complete.remove(group_id)
            self.selected.append(group_id)

    def train(self) -> None:
        size = self.policy.groups_per_update
        if len(self.selected) >= size:
            groups, self.selected = self.selected[:size], self.selected[size:]
            for group_id in groups:
                staleness = self.policy.version - self.policy.dispatch_version(group_id)
                assert 0 <= staleness <= self.policy.max_staleness
            self.policy.remove_trained(groups)
            self.num_trained += size

    def drain(self) -> None:
        """With admission stopped and every episode run, whatever fills an update is trained:
        nothing is stuck.
        """
        for group_id in self.in_flight:
            self.policy.complete(group_id)
        self.complete.update(self.in_flight)
        self.in_flight.clear()
        while self.complete:
            before = len(self.complete)
            self.select()
            assert len(self.complete) == before - 1
            self.train()


@settings(max_examples=200, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_update=st.integers(1, 5),
    in_order=st.booleans(),
    spare=st.none() | st.integers(0, 10),
    choices=st.lists(st.tuples(st.sampled_from("aaffxstp"), st.integers(0, 30)), max_size=250),
)
def test_no_schedule_breaks_a_bound_or_leaves_a_group_behind(
    max_staleness: int,
    groups_per_update: int,
    in_order: bool,
    spare: int | None,
    choices: list[tuple[str, int]],
) -> None:
    schedule = Schedule(
        StalenessPolicy(
            max_staleness=max_staleness,
            groups_per_update=groups_per_update,
            in_order=in_order,
            max_outstanding=None if spare is None else groups_per_update + spare,
        )
    )
    for action, choice in choices:
        match action:
            case "a":
                schedule.admit()
            case "f":
                schedule.finish(choice, kept=True)
            case "x":
                schedule.finish(choice, kept=False)
            case "s":
                schedule.select()
            case "t":
                schedule.train()
            case "p":
                schedule.publish()
        assert schedule.policy.evict() == []
    schedule.drain()


def test_groups_that_no_update_would_take_are_not_admitted() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_update=2, num_updates=2)
    for group_id in range(4):
        assert policy.can_admit(policy.version)
        policy.admit(group_id, policy.version)
    for group_id in (0, 1):
        policy.complete(group_id)
    assert [policy.select(), policy.select()] == [0, 1]
    policy.remove_trained([0, 1])
    # two groups are outstanding, and one update of two is left
    assert not policy.can_admit(policy.version)


def handover(max_staleness: int = 1) -> tuple[Handover, StalenessPolicy]:
    staleness = StalenessPolicy(max_staleness=max_staleness, groups_per_update=2)
    for group_id in range(4 if max_staleness else 2):
        staleness.admit(group_id, staleness.version)
    return Handover(staleness), staleness


def ids(groups: object) -> list[int]:
    return [group.group_id for group in groups]  # type: ignore[attr-defined]


def test_a_group_is_buffered_then_in_training_then_gone() -> None:
    groups, staleness = handover()
    groups.add_group(group_of(0))
    groups.add_group(group_of(1))
    assert (groups.num_buffered, groups.num_in_training) == (2, 0)
    assert groups.hand_over(0)
    assert groups.hand_over(0)
    assert (groups.num_buffered, groups.num_in_training) == (0, 2)
    groups.require_groups([group_of(1), group_of(0)], new_version=1)
    assert ids(groups.take_trained()) == [0, 1]
    assert (groups.num_in_training, staleness.version) == (0, 1)


def test_a_later_update_gets_nothing_before_the_earlier_one_is_full() -> None:
    groups, _ = handover()
    groups.add_group(group_of(0))
    assert not groups.hand_over(1)
    assert groups.hand_over(0)
    groups.add_group(group_of(1))
    groups.add_group(group_of(2))
    assert not groups.hand_over(1)
    assert groups.hand_over(0)
    assert groups.hand_over(1)
    assert (ids(groups.get_groups(0)), ids(groups.get_groups(1))) == ([0, 1], [2])


def test_groups_of_another_update_and_half_an_update_are_refused() -> None:
    groups, _ = handover()
    groups.add_group(group_of(0))
    groups.hand_over(0)
    with pytest.raises(ValueError, match=r"trained on groups \[3\] to version 1, expected .*\[0\]"):
        groups.require_groups([group_of(3)], new_version=1)
    with pytest.raises(ValueError, match="expected version 1"):
        groups.require_groups([group_of(0)], new_version=2)
    with pytest.raises(ValueError, match="update 0 has 1 of 2 groups so far"):
        groups.require_groups([group_of(0)], new_version=1)


def test_what_an_update_waits_for_is_its_oldest_running_group() -> None:
    groups, _ = handover(max_staleness=0)
    groups.add_group(group_of(1))
    assert groups.describe_wait(lambda group_id: [group_id * 10]) == (
        "2 of 2 groups, the oldest of 1 running is group 0: episodes 0"
    )
    groups.add_group(group_of(0))
    assert groups.describe_wait(lambda group_id: []) == "update 0 to be trained"


def test_groups_that_are_too_old_are_evicted_with_what_was_buffered() -> None:
    staleness = StalenessPolicy(max_staleness=0, groups_per_update=1, version=3)
    staleness.admit(5, dispatch_version=1)
    staleness.admit(6, dispatch_version=3)
    groups = Handover(staleness)
    groups.add_group(group_of(5))
    assert list(groups.evict()) == [5]
    assert groups.num_buffered == 0


def test_environments_that_could_never_run_are_refused_with_the_inequality() -> None:
    config = SchedulerConfig(groups_per_update=2, max_staleness=1)
    config.require_feasible(num_envs=16, group_size=4)
    expected = r"\(max_staleness \+ 1\) \* groups_per_update \* group_size = \(1 \+ 1\) \* 2 \* 4 = 16 < num_envs = 17"
    with pytest.raises(ConfigError, match=expected):
        config.require_feasible(num_envs=17, group_size=4)


def test_updates_that_could_never_fill_are_refused_with_the_inequality() -> None:
    config = SchedulerConfig(groups_per_update=4, max_outstanding_groups=3)
    with pytest.raises(ConfigError, match="max_outstanding_groups=3 < groups_per_update=4"):
        config.require_feasible(num_envs=1, group_size=1)


def test_a_bound_on_outstanding_groups_counts_among_what_environments_can_run() -> None:
    config = SchedulerConfig(groups_per_update=4, max_staleness=3, max_outstanding_groups=4)
    with pytest.raises(
        ConfigError, match=r"max_outstanding_groups \* group_size = 4 \* 2 = 8 < num_envs = 9"
    ):
        config.require_feasible(num_envs=9, group_size=2)


def test_deterministic_mode_needs_synchronous_training() -> None:
    with pytest.raises(ConfigError, match="expected max_staleness=0"):
        SchedulerConfig(groups_per_update=1, max_staleness=1, deterministic=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups_per_update", 0),
        ("max_staleness", -1),
        ("max_attempts", 0),
        ("episode_timeout_s", 0.0),
        ("max_filtered_in_a_row", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"SchedulerConfig.{field} is"):
        SchedulerConfig(**{"groups_per_update": 1, field: value})
