"""The speeds of hosts, compared by kind of environment: how many episodes each gets, and which one takes too long."""

from collections import Counter
from typing import Any

import pytest
from host_cluster import Cluster, RemoteHostRunner
from rollout_fakes import CountingEngine

from vla_rl.remote_rollout.host_pace import ANY_KIND, HostLoad, HostPace
from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.tasks import run_in_simulated_time

NO_RUNNER: Any = None


def hosts(**slots: int) -> tuple[dict[str, HostLoad], HostPace]:
    members = {name: HostLoad(NO_RUNNER, {ANY_KIND: each}) for name, each in slots.items()}
    return members, HostPace(members)


def test_a_host_without_a_free_slot_gets_nothing() -> None:
    members, pace = hosts(small=1, large=2)
    assert pace.find_freest(ANY_KIND) == ("large", members["large"])
    assert pace.find_freest(ANY_KIND, excluded="large") == ("small", members["small"])
    for member in members.values():
        member.kinds[ANY_KIND].num_running = member.count_slots(ANY_KIND)
    assert pace.find_freest(ANY_KIND) is None


def test_an_episode_goes_where_it_ends_soonest() -> None:
    members, pace = hosts(quick=4, idle=4)
    pace.record_episode(members["quick"], ANY_KIND, 10.0, 10)  # 1 s a decision
    pace.record_episode(members["idle"], ANY_KIND, 25.0, 10)  # 2.5 s, which is not slow yet
    members["quick"].kinds[ANY_KIND].num_running = 1
    assert pace.find_freest(ANY_KIND) == ("quick", members["quick"])  # 1 * 2 / 4 before 2.5 * 1 / 4
    members["quick"].kinds[ANY_KIND].num_running = 2
    assert pace.find_freest(ANY_KIND) == ("idle", members["idle"])  # 2.5 * 1 / 4 before 1 * 3 / 4


@pytest.mark.parametrize(("decision_s", "slots"), [(3.0, 8), (4.0, 2), (100.0, 1)])
def test_a_slow_host_has_slots_in_proportion_to_its_speed_and_keeps_one(
    decision_s: float, slots: int
) -> None:
    members, pace = hosts(first=8, second=8, other=8)
    for name in ("first", "second"):
        pace.record_episode(members[name], ANY_KIND, 1.0, 1)
    assert pace.all_slots(members["other"]) == 8  # nothing has ended there
    pace.record_episode(members["other"], ANY_KIND, decision_s, 1)
    assert pace.is_slow(members["other"], ANY_KIND) == (slots < 8)
    assert pace.slots(members["other"], ANY_KIND) == slots
    assert pace.all_slots(members["first"]) == 8


def test_an_episode_is_overdue_after_half_as_long_again_as_the_longest_on_hosts_that_are_not_slow() -> (
    None
):
    members, pace = hosts(quick=4, slow=4)
    pace.record_episode(members["quick"], ANY_KIND, 40.0, 40)
    pace.record_episode(members["slow"], ANY_KIND, 900.0, 10)
    for _ in range(14):
        pace.record_episode(members["quick"], ANY_KIND, 10.0, 10)
        assert pace.overdue_s(ANY_KIND) is None
    pace.record_episode(members["quick"], ANY_KIND, 10.0, 10)
    assert pace.overdue_s(ANY_KIND) == 60.0
    for _ in range(100):  # the longest is no longer one of the last
        pace.record_episode(members["quick"], ANY_KIND, 10.0, 10)
    assert pace.overdue_s(ANY_KIND) == 15.0


def test_kinds_of_episodes_are_compared_apart() -> None:
    member = HostLoad(NO_RUNNER, {"long": 2, "short": 3})
    pace = HostPace({"host": member})
    pace.record_episode(member, "long", 100.0, 1)
    pace.record_episode(member, "short", 1.0, 1)
    assert not pace.is_slow(member, "long")
    assert pace.all_slots(member) == 5
    member.kinds["long"].num_running = 2
    assert pace.find_freest("long") is None
    assert pace.find_freest("short") == ("host", member)


def kind_of(episode: EpisodeSpec) -> str:
    return "odd" if int(episode.options["i"]) % 2 else "even"


class HostOfKinds(RemoteHostRunner):
    """A host with environments of two kinds, of which one is slow; it notes the most that ran of each."""

    def __init__(self, engine: CountingEngine, slots: dict[str, int], odd_s: float) -> None:
        super().__init__(engine, slots["even"])
        self._odd = RemoteHostRunner(engine, slots["odd"], odd_s)
        self.slots, self._running = slots, Counter[str]()
        self.most = Counter[str]()

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        kind = kind_of(episode)
        self._running[kind] += 1
        self.most |= self._running
        try:
            if kind == "odd":
                return await self._odd.run_episode(episode, timeout_s=timeout_s)
            return await super().run_episode(episode, timeout_s=timeout_s)
        finally:
            self._running[kind] -= 1


def over_hosts_of_kinds(
    odd_s: float, *each: dict[str, int]
) -> tuple[list[HostOfKinds], list[dict[str, float]]]:
    """Run ten updates over hosts with so many environments of each kind; return the metrics of each."""

    async def main() -> tuple[list[HostOfKinds], list[dict[str, float]]]:
        cluster = Cluster(groups_per_update=8, kind_of=kind_of)
        hosts = [HostOfKinds(cluster.engine, slots, odd_s) for slots in each]
        for number, host in enumerate(hosts):
            cluster.runner.add_host(f"host{number}", host, host.slots)
        lines = []
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(10):
                await cluster.update()
                lines.append(cluster.runner.metrics())
        return hosts, lines

    return run_in_simulated_time(main())


def test_an_episode_goes_to_a_host_with_a_free_environment_of_its_kind() -> None:
    hosts, lines = over_hosts_of_kinds(0.01, {"even": 1, "odd": 3}, {"even": 3, "odd": 1})
    assert lines[-1]["hosts/host0/slots"] == 4
    # all of each kind were used, and no episode waited on a host whose environments were taken
    assert [dict(host.most) for host in hosts] == [host.slots for host in hosts]


def test_a_host_that_ran_the_slower_kind_of_episodes_does_not_count_as_slow() -> None:
    _, lines = over_hosts_of_kinds(2.0, {"even": 2, "odd": 2}, {"even": 2, "odd": 2})
    for host in ("hosts/host0", "hosts/host1"):
        assert [line[f"{host}/slots"] for line in lines] == [4] * 10
        assert lines[-1][f"{host}/odd_decision_s"] > 10 * lines[-1][f"{host}/even_decision_s"]
