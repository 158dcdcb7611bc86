"""A host with environments of several kinds: slots and speeds are kept for each kind."""

from collections import Counter

from far_hosts import FarHost
from host_cluster import Cluster
from rollout_fakes import CountingEngine

from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.simulated_time import run_in_simulated_time


def kind_of(episode: EpisodeSpec) -> str:
    return "odd" if int(episode.options["i"]) % 2 else "even"


class HostOfKinds(FarHost):
    """A host with environments of two kinds, of which one is slow; it notes the most that ran of each."""

    def __init__(self, engine: CountingEngine, slots: dict[str, int], odd_s: float) -> None:
        super().__init__(engine, slots["even"])
        self._odd = FarHost(engine, slots["odd"], odd_s)
        self.slots, self._running = slots, Counter[str]()
        self.most = Counter[str]()

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        kind = kind_of(episode)
        self._running[kind] += 1
        self.most |= self._running
        try:
            if kind == "odd":
                return await self._odd.play(episode, timeout_s=timeout_s)
            return await super().play(episode, timeout_s=timeout_s)
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
            cluster.players.add(f"host{number}", host, host.slots)
        lines = []
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(10):
                await cluster.update()
                lines.append(cluster.players.metrics())
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
