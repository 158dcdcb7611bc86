"""A version of the weights enters every machine once, and acts on all hosts or on none."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from weight_hosts import Host, Site, hosts_runtime

from vla_rl.actors.remote import peer_sockets, shared_handles
from vla_rl.actors.remote.direct_link import ListenAddress
from vla_rl.errors import ActorDied, CheckpointError, HostNotReached, WeightsNotGiven
from vla_rl.remote_rollout.chain_broadcast import Hop, Reachability, machine_name, plan_hops
from vla_rl.remote_rollout.flat_weights import flatten_weights
from vla_rl.remote_rollout.weight_links import ReceivedBytes, WeightRows
from vla_rl.remote_rollout.weight_publication import HostWeights
from vla_rl.remote_rollout.weight_sources import LocalWeightSource, WeightHost
from vla_rl.types import SOLE_MEMBER, AgentNames


@pytest.fixture(autouse=True)
async def runtime() -> AsyncIterator[None]:
    async with hosts_runtime():
        yield


async def test_every_host_has_a_version_before_any_acts_with_it() -> None:
    log: list[str] = []
    hosts = Host("a", log), Host("b", log)
    site = Site(*hosts)
    site.open()
    await site.publish(1)
    assert sorted(log[-2:]) == ["apply a", "apply b"]
    assert sorted(log[:-2]) == ["begin a", "begin b", "check a", "check b", "take b"]
    assert site.have(hosts) == [True, True]
    assert site.versions == [1]


@pytest.mark.parametrize("call", ["begin", "check", "apply"])
async def test_a_host_that_is_lost_meanwhile_is_dropped_and_the_others_go_on(call: str) -> None:
    log: list[str] = []
    hosts = Host("lost", log, fails_in=call), Host("stays", log)
    site = Site(*hosts)
    site.open()
    await site.publish(1)
    assert (site.lost, list(site.weights.hosts), site.versions) == (["lost"], ["stays"], [1])
    assert site.have(hosts[1:]) == [True]


async def test_a_host_that_joins_gets_the_newest_version_first() -> None:
    site, late = Site(), Host("late", [])
    site.open()
    # nothing was published yet: it has the weights of the policy's files
    assert await site.catch_up(late) == 0
    assert late.log == []
    await site.publish(1)
    await site.publish(2)
    assert await site.catch_up(late) == 2
    assert site.have([late]) == [True]


async def test_weights_before_the_hosts_are_up_are_not_sent() -> None:
    host = Host("a", [])
    site = Site(host)
    site.sink.apply_weights(site.learner, 7)
    assert (host.log, site.versions) == ([], [7])
    # it has read the policy's files, which are of this version
    host.version = 7
    assert await site.catch_up(host, is_new=True) == 7
    assert host.log == []


async def test_a_host_that_is_taken_over_gets_the_weights_of_the_resume_unless_it_has_them() -> (
    None
):
    host = Host("a", [])
    site = Site(host)
    # its last weights are of an update that the killed run did not save
    host.version, host.digest = 8, "of those"
    site.sink.apply_weights(site.learner, 7)
    assert await site.catch_up(host) == 7
    assert site.have([host]) == [True]
    assert host.log == ["begin a", "check a", "apply a"]
    assert await site.catch_up(host) == 7
    assert len(host.log) == 3
    # the same number after another update 7
    host.digest = "of another update 7"
    assert await site.catch_up(host) == 7
    assert len(host.log) == 6


async def test_a_host_with_another_policy_ends_the_publication() -> None:
    host = Host("a", [], shape=(4, 2))
    site = Site(host)
    site.open()
    with pytest.raises(
        CheckpointError, match=r"torch\.float32 \[2, 3\], and torch\.float32 \[2, 4\] on this host"
    ):
        await site.publish(1)
    assert site.versions == []


async def test_weights_that_an_update_did_not_change_are_not_sent_again() -> None:
    log: list[str] = []
    site = Site(Host("a", log))
    site.open()
    await site.publish(1)
    await site.publish(2)
    assert log == ["begin a", "check a", "apply a", "renew a"]
    with torch.no_grad():
        site.learner.bias += 1.0
    await site.publish(3)
    assert log[4:] == ["begin a", "check a", "apply a"]
    assert site.versions == [1, 2, 3]


async def test_hosts_serve_a_version_once_they_have_it_of_every_policy() -> None:
    versions: list[int] = []
    agent_names = AgentNames(["left", "right"])
    weights = HostWeights(
        agent_names, 0, lambda name, death: None, lambda version: None, versions.append
    )
    for version, name in ((1, "left"), (1, "right"), (2, "right"), (2, "left")):
        weights.sinks[name].apply_weights(nn.Linear(3, 2), version)
    assert versions == [0, 1, 1, 2]
    names = {"weights_s", "weights_waited_s"}
    assert weights.metrics().keys() == {
        f"{of}/hosts/{name}" for of in agent_names.names for name in names
    }


LARGE = (1024, 2048)
"""Five pieces."""


def large_hosts(log: list[str]) -> list[Host]:
    return [Host(name, log, shape=LARGE) for name in "abc"]


async def test_one_copy_leaves_the_learner_and_hosts_pass_it_on() -> None:
    hosts = large_hosts([])
    site = Site(*hosts, shape=LARGE)
    site.open()
    await site.publish(1)
    num_bytes = 4 * (1024 * 2048 + 2048)
    assert [host.num_put for host in hosts] == [num_bytes, 0, 0]
    assert site.have(hosts) == [True, True, True]
    # a host that was away takes the version from one that has it
    late = Host("late", [], shape=LARGE)
    assert await site.catch_up(late) == 1
    assert late.num_put == 0
    assert site.have([late]) == [True]


class Dying(Host):
    """It dies once it has some of a version, like a process that is killed."""

    async def receive_weights(self, member: str, rows: WeightRows) -> ReceivedBytes:
        receiving = asyncio.create_task(self.cache.receive(member, rows))
        while self.received(member) == 0:  # noqa: ASYNC110 - bytes have no event
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        self.die()
        raise self.death()


class Silent(Host):
    """Its cable is pulled: it passes nothing on, and no connection is closed."""

    async def receive_weights(self, member: str, rows: WeightRows) -> ReceivedBytes:
        await asyncio.sleep(0.2)
        raise self.death()


@pytest.mark.parametrize("kind", [Dying, Silent])
async def test_what_a_neighbour_that_is_lost_has_not_passed_on_comes_from_the_learner(
    kind: type[Host],
) -> None:
    first, _, last = large_hosts([])
    lost = kind("b", [], shape=LARGE)
    site = Site(first, lost, last, shape=LARGE)
    site.open()
    async with asyncio.timeout(20):
        await site.publish(1)
    assert (site.lost, list(site.weights.hosts)) == (["b"], ["a", "c"])
    assert site.have([first, last]) == [True, True]
    assert last.num_put > 0


class Slow(Host):
    """It takes nothing from its peer before it may."""

    may_take: asyncio.Event

    async def receive_weights(self, member: str, rows: WeightRows) -> ReceivedBytes:
        await self.may_take.wait()
        return await super().receive_weights(member, rows)


async def test_the_learner_goes_on_before_the_slowest_host_has_its_weights() -> None:
    first, slow = Host("a", [], shape=LARGE), Slow("b", [], shape=LARGE)
    slow.may_take = asyncio.Event()
    site = Site(first, slow, shape=LARGE)
    site.open()
    async with asyncio.timeout(20):
        await site.begin_to_publish(1)
        assert (site.coming, site.versions) == ([1], [])
        # nothing acts with it, and a second version waits
        site.learner.bias.data.add_(1.0)
        second = asyncio.create_task(site.begin_to_publish(2))
        await asyncio.sleep(0.1)
        assert (site.coming, first.version, second.done()) == ([1], 0, False)
        slow.may_take.set()
        await second
        await site.wait_applied()
    assert (site.coming, site.versions) == ([1, 2], [1, 2])
    assert site.have([first, slow]) == [True, True]


class Fleeting(LocalWeightSource):
    """As the weights of ranks: gone once they have left, because the ranks have newer ones."""

    is_kept = False
    num_asked = 0

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        # all bytes of a peer are only compared
        if num_bytes < self.heading.num_bytes:
            self.num_asked += 1
            if self.num_asked > 1:
                raise WeightsNotGiven("the ranks have newer weights by now")
        await super().bring(host, num_bytes)


async def test_after_the_ranks_went_on_a_host_that_has_the_weights_gives_them() -> None:
    first, _, last = large_hosts([])
    lost = Dying("b", [], shape=LARGE)
    site = Site(first, lost, last, shape=LARGE)
    site.open()
    origin = Fleeting(flatten_weights(site.learner, 1, SOLE_MEMBER))
    async with asyncio.timeout(20):
        await site.weights.publish(origin)
        await site.wait_applied()
    assert origin.num_asked == 2  # the last host has asked for what the lost one did not pass on
    assert (site.lost, site.versions) == (["b"], [1])
    assert site.have([first, last]) == [True, True]
    assert last.num_put == 0


async def test_weights_that_a_host_cannot_get_any_more_are_skipped_by_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_handles, "LINK_WITHIN_S", 0.2)
    hosts = large_hosts([])[:2]
    dead = Host("dead", [], fails_in="begin", shape=LARGE)
    site = Site(*hosts, dead, shape=LARGE)
    # what is sent there is swallowed: the second host gets all from the learner
    hosts[0].reached_at = "192.0.2.1"
    site.open()
    async with asyncio.timeout(20):
        await site.weights.publish(Fleeting(flatten_weights(site.learner, 1, SOLE_MEMBER)))
        await site.wait_applied()
        assert "weights 1 are skipped: b cannot get them any more" in caplog.text
        assert (site.versions, site.lost) == ([], ["dead"])
        assert [host.version for host in hosts] == [0, 0]
        await site.publish(2)
    assert (site.coming, site.versions) == ([1, 2], [2])
    assert site.have(hosts) == [True, True]


class OutOfReach(Fleeting):
    """The ranks reach every host but `b`."""

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        if cast(Host, host.actor).name == "b":
            raise HostNotReached("b refuses the connection")
        await LocalWeightSource.bring(self, host, num_bytes)


async def test_the_ranks_keep_weights_that_a_host_has_to_get_another_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_handles, "LINK_WITHIN_S", 0.2)
    hosts = large_hosts([])[:2]
    site = Site(*hosts, shape=LARGE)
    hosts[0].reached_at = "192.0.2.1"
    site.open()
    async with asyncio.timeout(20):
        await site.publish(1)  # it is known now that the two cannot connect
        site.learner.bias.data.add_(1.0)
        with pytest.raises(WeightsNotGiven, match="b refuses"):
            await site.weights.publish(OutOfReach(flatten_weights(site.learner, 2, SOLE_MEMBER)))
        await site.publish(2)  # as a learner does then: through its own process
    assert "skipped" not in caplog.text
    assert site.versions == [1, 2]
    assert site.have(hosts) == [True, True]


async def test_an_error_after_the_weights_have_left_is_that_of_their_task() -> None:
    other = Host("other", [], shape=(3, 4))
    site = Site(other)
    site.open()
    await site.begin_to_publish(1)
    with pytest.raises(CheckpointError, match="on this host"):
        await site.wait_applied()


async def test_a_host_that_cannot_reach_its_neighbour_is_served_by_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_handles, "LINK_WITHIN_S", 0.2)
    hosts = large_hosts([])[:2]
    site = Site(*hosts, shape=LARGE)
    # an address that swallows what is sent there, as a firewall does
    hosts[0].reached_at = "192.0.2.1"
    site.open()
    async with asyncio.timeout(20):
        await site.publish(1)
        num_put = hosts[1].num_put
        assert num_put == hosts[0].num_put > 0
        site.learner.bias.data.add_(1.0)
        hosts[1].log.clear()
        await site.publish(2)
    # it is known now, and not tried again
    assert "check b" in hosts[1].log
    assert "take b" not in hosts[1].log
    assert site.have(hosts) == [True, True]


async def test_a_host_without_a_free_port_passes_nothing_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = large_hosts([])[:2]
    site = Site(*hosts, shape=LARGE)
    site.open()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        address = ListenAddress("127.0.0.1", (port, port))
        monkeypatch.setattr(peer_sockets, "get_own_address", lambda: address)
        with pytest.raises(OSError, match=r"no port from .* wider range with --ports"):
            await hosts[0].share_rows()
        await site.publish(1)
    assert hosts[1].num_put == hosts[0].num_put
    assert site.have(hosts) == [True, True]


async def test_engines_of_one_machine_share_the_bytes_that_came_to_it() -> None:
    log: list[str] = []
    hosts = [Host(name, log, shape=LARGE) for name in ("a:0", "a:1")]
    site = Site(*hosts, shape=LARGE)
    site.open()
    await site.publish(1)
    assert hosts[0].num_put > 0
    assert hosts[1].num_put == 0
    assert site.have(hosts) == [True, True]
    assert log == ["begin a:0", "check a:0", "apply a:0", "apply a:1"]


def test_hosts_form_a_chain_of_which_the_control_process_serves_the_first() -> None:
    assert plan_hops(["a", "b", "c"]) == (
        Hop(host="a"),
        Hop(host="b", source="a"),
        Hop(host="c", source="b"),
    )


def test_engines_of_one_machine_read_its_memory() -> None:
    assert plan_hops(["a:0", "a:1", "b:0", "b:1"]) == (
        Hop(host="a:0"),
        Hop(host="b:0", source="a:0"),
        Hop(host="a:1", source="a:0", opens_memory=True),
        Hop(host="b:1", source="b:0", opens_memory=True),
    )


def test_a_host_that_was_away_takes_the_version_from_one_that_has_it() -> None:
    assert plan_hops(["c"], having=["a", "b"]) == (Hop(host="c", source="b"),)
    assert plan_hops(["a:1"], having=["a:0", "b"]) == (
        Hop(host="a:1", source="a:0", opens_memory=True),
    )


def test_a_host_that_cannot_reach_its_neighbour_takes_from_the_control_process() -> None:
    planned = plan_hops(["a", "b", "c"], unreachable={("b", "a")})
    assert [each.source for each in planned] == [None, None, "b"]


names = st.builds("{}:{}".format, st.sampled_from("abcd"), st.integers(0, 3))


@given(
    st.lists(names, unique=True),
    st.sets(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"))),
)
def test_each_host_gets_one_delivery_after_its_source_and_none_serves_two_machines(
    wanting: list[str], unreachable: set[tuple[str, str]]
) -> None:
    planned = plan_hops(wanting, unreachable=unreachable)
    assert sorted(each.host for each in planned) == sorted(wanting)
    served: set[str] = set()
    between: list[str] = []
    for each in planned:
        assert each.source is None or each.source in served
        served.add(each.host)
        if each.source is None:
            continue
        is_near = machine_name(each.source) == machine_name(each.host)
        assert each.opens_memory == is_near
        if not is_near:
            assert (machine_name(each.host), machine_name(each.source)) not in unreachable
            between.append(each.source)
    assert len(between) == len(set(between))


REFUSED = HostNotReached("a refuses the connection")


def test_a_host_that_has_a_part_comes_first_and_one_that_no_rank_reaches_last() -> None:
    reach = Reachability()
    assert reach.in_order(["a:0", "b", "c"], {"b"}) == ["b", "a:0", "c"]
    reach.note_not_reached({"b": HostNotReached("b refuses the connection")})
    assert reach.in_order(["a:0", "b", "c"], {"b"}) == ["a:0", "c", "b"]


def test_a_host_that_no_rank_reaches_is_an_error_that_passes_while_there_is_another() -> None:
    reach = Reachability()
    with pytest.raises(WeightsNotGiven, match="a refuses the connection") as raised:
        reach.require_reached({"a:1": REFUSED}, ["a:0", "a:1", "b"])
    assert type(raised.value) is WeightsNotGiven
    with pytest.raises(HostNotReached, match="b refuses"):
        reach.require_reached({"b": HostNotReached("b refuses")}, ["a:0", "a:1", "b"])


def test_other_failures_say_nothing_of_the_way() -> None:
    reach = Reachability()
    failed = {"a": ActorDied("a", 1, "killed"), "b": WeightsNotGiven("newer ones are there")}
    assert reach.note_not_reached(failed) == []
    reach.require_reached(failed, ["a", "b"])
    assert reach.in_order(["a", "b", "c"], ()) == ["a", "b", "c"]


def test_machines_that_cannot_connect_do_not_take_from_each_other() -> None:
    reach = Reachability()
    assert reach.planned(["a", "b"])[1] == Hop(host="b", source="a")
    reach.unreachable.add(("b", "a"))
    assert reach.planned(["a", "b"])[1] == Hop(host="b")
    assert reach.planned(["b"], having=["a"]) == (Hop(host="b"),)
