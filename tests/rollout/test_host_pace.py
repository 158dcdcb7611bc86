"""The speeds of hosts, compared: how many episodes each gets, and which episode takes too long."""

from typing import Any

import pytest

from vla_rl.remote_rollout.host_pace import ANY_KIND, HostLoad, HostPace

NO_PLAYER: Any = None


def hosts(**slots: int) -> tuple[dict[str, HostLoad], HostPace]:
    members = {name: HostLoad(NO_PLAYER, {ANY_KIND: each}) for name, each in slots.items()}
    return members, HostPace(members)


def test_a_host_without_a_free_slot_gets_nothing() -> None:
    members, pace = hosts(small=1, large=2)
    assert pace.freest(ANY_KIND) == ("large", members["large"])
    assert pace.freest(ANY_KIND, besides="large") == ("small", members["small"])
    for member in members.values():
        member.kinds[ANY_KIND].num_running = member.num_slots(ANY_KIND)
    assert pace.freest(ANY_KIND) is None


def test_an_episode_goes_where_it_ends_soonest() -> None:
    members, pace = hosts(quick=4, idle=4)
    pace.note(members["quick"], ANY_KIND, 10.0, 10)  # 1 s a decision
    pace.note(members["idle"], ANY_KIND, 25.0, 10)  # 2.5 s, which is not slow yet
    members["quick"].kinds[ANY_KIND].num_running = 1
    assert pace.freest(ANY_KIND) == ("quick", members["quick"])  # 1 * 2 / 4 before 2.5 * 1 / 4
    members["quick"].kinds[ANY_KIND].num_running = 2
    assert pace.freest(ANY_KIND) == ("idle", members["idle"])  # 2.5 * 1 / 4 before 1 * 3 / 4


@pytest.mark.parametrize(("decision_s", "slots"), [(3.0, 8), (4.0, 2), (100.0, 1)])
def test_a_slow_host_has_slots_in_proportion_to_its_speed_and_keeps_one(
    decision_s: float, slots: int
) -> None:
    members, pace = hosts(first=8, second=8, other=8)
    for name in ("first", "second"):
        pace.note(members[name], ANY_KIND, 1.0, 1)
    assert pace.all_slots(members["other"]) == 8  # nothing has ended there
    pace.note(members["other"], ANY_KIND, decision_s, 1)
    assert pace.is_slow(members["other"], ANY_KIND) == (slots < 8)
    assert pace.slots(members["other"], ANY_KIND) == slots
    assert pace.all_slots(members["first"]) == 8


def test_an_episode_is_overdue_after_half_as_long_again_as_the_longest_on_hosts_that_are_not_slow() -> (
    None
):
    members, pace = hosts(quick=4, slow=4)
    pace.note(members["quick"], ANY_KIND, 40.0, 40)
    pace.note(members["slow"], ANY_KIND, 900.0, 10)
    for _ in range(14):
        pace.note(members["quick"], ANY_KIND, 10.0, 10)
        assert pace.overdue_s(ANY_KIND) is None
    pace.note(members["quick"], ANY_KIND, 10.0, 10)
    assert pace.overdue_s(ANY_KIND) == 60.0
    for _ in range(100):  # the longest is no longer one of the last
        pace.note(members["quick"], ANY_KIND, 10.0, 10)
    assert pace.overdue_s(ANY_KIND) == 15.0


def test_kinds_of_episodes_are_compared_apart() -> None:
    member = HostLoad(NO_PLAYER, {"long": 2, "short": 3})
    pace = HostPace({"host": member})
    pace.note(member, "long", 100.0, 1)
    pace.note(member, "short", 1.0, 1)
    assert not pace.is_slow(member, "long")
    assert pace.all_slots(member) == 5
    member.kinds["long"].num_running = 2
    assert pace.freest("long") is None
    assert pace.freest("short") == ("host", member)
