"""New weights reach all hosts in two phases; a host that fails is dropped, a late one catches up."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.errors import ActorDied, CheckpointError
from vla_rl.training.hosts.flat_weights import IncomingWeights
from vla_rl.training.hosts.messages import HeldVersion, HostStatus, WeightHeading
from vla_rl.training.hosts.publishing import HostWeights
from vla_rl.types import SOLE_MEMBER, Roster


class Host:
    """The side of a host, in this loop; it fails in one call, if wanted."""

    def __init__(self, name: str, log: list[str], fails_in: str = "") -> None:
        self.name, self.log, self._fails_in = name, log, fails_in
        torch.manual_seed(1)
        self.network = nn.Linear(3, 2)
        self.version, self.digest = 0, ""

    async def begin_weights(self, heading: WeightHeading) -> None:
        self._note("begin")
        self._incoming = IncomingWeights(heading, self.network)

    async def put_weights(self, member: str, start: int, piece: np.ndarray) -> None:
        self._incoming.put(start, piece)

    async def check_weights(self, member: str) -> None:
        await asyncio.sleep(0)
        self._note("check")
        self._incoming.check()

    async def apply_weights(self, member: str) -> None:
        self._note("apply")
        self._incoming.apply()
        self.version, self.digest = self._incoming.heading.version, self._incoming.heading.digest

    async def renew_weights(self, member: str, version: int) -> None:
        self._note("renew")
        self.version = version

    def _note(self, call: str) -> None:
        if call == self._fails_in:
            raise ActorDied(self.name, 1, "SIGKILL")
        self.log.append(f"{call} {self.name}")


class Site:
    """Hosts, the learner's network, and what was reported."""

    def __init__(self, *hosts: Host) -> None:
        self.learner = nn.Linear(3, 2)
        self.lost: list[str] = []
        self.versions: list[int] = []
        self.weights = HostWeights(
            Roster([SOLE_MEMBER]),
            0,
            lambda name, _: self.lost.append(name),
            self.versions.append,
        )
        self.sink = self.weights.sinks[SOLE_MEMBER]
        self.weights.hosts.update({host.name: host for host in hosts})  # type: ignore[misc]

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self.sink.adopt, self.learner, version)

    async def catch_up(self, host: Host, *, is_new: bool = False) -> int:
        held = {SOLE_MEMBER: HeldVersion(version=host.version, digest=host.digest)}
        status = HostStatus(num_slots=1, held=held)
        found = await self.weights.catch_up(host, status, is_new=is_new)  # type: ignore[arg-type]
        return found[SOLE_MEMBER].version

    def have(self, hosts: Sequence[Host]) -> list[bool]:
        return [torch.equal(host.network.weight, self.learner.weight) for host in hosts]


async def test_every_host_has_a_version_before_any_acts_with_it() -> None:
    log: list[str] = []
    hosts = Host("a", log), Host("b", log)
    site = Site(*hosts)
    site.weights.open()
    await site.publish(1)
    assert sorted(log[-2:]) == ["apply a", "apply b"]
    assert sorted(log[:-2]) == ["begin a", "begin b", "check a", "check b"]
    assert site.have(hosts) == [True, True]
    assert site.versions == [1]


@pytest.mark.parametrize("call", ["begin", "check", "apply"])
async def test_a_host_that_is_lost_meanwhile_is_dropped_and_the_others_go_on(call: str) -> None:
    log: list[str] = []
    hosts = Host("lost", log, fails_in=call), Host("stays", log)
    site = Site(*hosts)
    site.weights.open()
    await site.publish(1)
    assert (site.lost, list(site.weights.hosts), site.versions) == (["lost"], ["stays"], [1])
    assert site.have(hosts[1:]) == [True]


async def test_a_host_that_joins_gets_the_newest_version_first() -> None:
    site, late = Site(), Host("late", [])
    site.weights.open()
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
    site.sink.adopt(site.learner, 7)
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
    site.sink.adopt(site.learner, 7)
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
    host = Host("a", [])
    host.network = nn.Linear(4, 2)
    site = Site(host)
    site.weights.open()
    with pytest.raises(
        CheckpointError, match=r"torch\.float32 \[2, 3\], and torch\.float32 \[2, 4\] on this host"
    ):
        await site.publish(1)
    assert site.versions == []


async def test_weights_that_an_update_did_not_change_are_not_sent_again() -> None:
    log: list[str] = []
    site = Site(Host("a", log))
    site.weights.open()
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
    roster = Roster(["left", "right"])
    weights = HostWeights(roster, 0, lambda name, death: None, versions.append)
    for version, name in ((1, "left"), (1, "right"), (2, "right"), (2, "left")):
        weights.sinks[name].adopt(nn.Linear(3, 2), version)
    assert versions == [0, 1, 1, 2]
    assert weights.metrics().keys() == {"left/hosts/weights_s", "right/hosts/weights_s"}
