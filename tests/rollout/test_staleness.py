"""The staleness policy: both bounds on any schedule, and no group that waits for ever."""

from hypothesis import given, settings, strategies as st

from vla_rl.rollout import StalenessPolicy


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
    policy.trained([0, 1])
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
    policy.filtered(0)
    assert policy.can_admit(policy.version)


def test_an_update_waits_for_an_old_group_that_could_not_be_trained_later() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_update=1)
    policy.admit(0, policy.version)  # version 0, due in update 1
    policy.admit(1, policy.version)
    policy.complete(1)
    assert policy.select() == 1  # update 0 takes the newer one: update 1 is still there for group 0
    policy.trained([1])
    policy.admit(2, policy.version)  # version 1, due in update 2
    policy.complete(2)
    assert policy.select() is None  # update 1 is the last one for group 0, still being played
    policy.complete(0)
    assert policy.select() == 0
    policy.trained([0])
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
    policy.filtered(0)
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
    policy.filtered(2)
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
                self.policy.filtered(group_id)

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
            self.policy.trained(groups)
            self.num_trained += size

    def drain(self) -> None:
        """With admission stopped and every episode played, whatever fills an update is trained:
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
    policy.trained([0, 1])
    # two groups are outstanding, and one update of two is left
    assert not policy.can_admit(policy.version)
