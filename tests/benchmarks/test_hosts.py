"""Hosts of the benchmarks: namespaces that stand in for them, a simulation of many."""

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.hosts import measured
from benchmarks.hosts.__main__ import PARTS, figures_of
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.simulate import KEYS, num_learning_gpus, simulate

GREETER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        with listening.accept()[0] as caller:
            caller.sendall(b"welcome")
"""

SENDER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    with listening.accept()[0] as caller:
        caller.sendall(bytes(2_000_000))
"""

OWNER = """
import time
from benchmarks.hosts.namespaces import network_namespaces
with network_namespaces(1) as (host,):
    print(host.popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[NamespaceHost, ...]]:
    try:
        with network_namespaces(2) as opened:
            yield opened
    except NamespacesRefused as reason:
        pytest.skip(str(reason))


@pytest.mark.needs_root
def test_a_host_answers_another_until_its_cable_is_pulled(hosts: tuple[NamespaceHost, ...]) -> None:
    first, second = hosts
    greeter = second.popen([sys.executable, "-c", GREETER, second.address], stdout=subprocess.PIPE)
    assert greeter.stdout is not None
    port = int(greeter.stdout.readline())

    def greeting(within_s: float) -> bytes:
        with socket.create_connection((second.address, port), timeout=within_s) as caller:
            return caller.recv(100)

    with first.entered():
        assert greeting(20) == b"welcome"
        assert min(second.carried_bytes()) > 0
        second.pull_cable()
        with pytest.raises(TimeoutError):
            greeting(0.3)
        second.plug_in_cable()
        assert greeting(20) == b"welcome"
    greeter.stdout.close()


@pytest.mark.needs_root
def test_a_command_that_fails_is_an_error_with_its_words(hosts: tuple[NamespaceHost, ...]) -> None:
    with pytest.raises(NamespacesRefused, match=r"`ip link set nosuch up` failed: .*nosuch"):
        hosts[0].run("ip", "link", "set", "nosuch", "up")


@pytest.mark.needs_root
def test_a_program_in_a_host_ends_when_its_owner_is_killed(
    hosts: tuple[NamespaceHost, ...],
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    program = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    try:
        assert select.select([program], [], [], 20)[0]
    finally:
        os.close(program)


@pytest.mark.needs_root
def test_a_limited_cable_carries_no_more_than_its_limit(hosts: tuple[NamespaceHost, ...]) -> None:
    first, second = hosts
    sender = second.popen([sys.executable, "-c", SENDER, second.address], stdout=subprocess.PIPE)
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    second.limit_cable(4.0)
    received, began = 0, time.monotonic()
    with first.entered(), socket.create_connection((second.address, port), timeout=20) as caller:
        while piece := caller.recv(1 << 16):
            received += len(piece)
    assert received == 2_000_000
    # 256 KB pass at once
    assert time.monotonic() - began > 1.7 / 4.0
    sender.stdout.close()


@pytest.mark.needs_root
def test_a_host_lists_the_processes_in_it_until_they_end(hosts: tuple[NamespaceHost, ...]) -> None:
    first, second = hosts
    shell = second.popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    assert {shell.pid, grandchild} == set(second.processes())
    assert first.processes() == []
    watched = os.pidfd_open(grandchild)
    shell.kill()
    os.kill(grandchild, signal.SIGKILL)
    shell.wait()
    assert select.select([watched], [], [], 20)[0]
    assert second.processes() == []
    shell.stdout.close()
    os.close(watched)


@pytest.fixture
def few_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of a quarter of the episodes: what waits and what overlaps stays the same."""
    monkeypatch.setattr(measured, "EPISODES_PER_GPU", 16)


@pytest.mark.usefixtures("few_episodes")
def test_an_update_ahead_fills_eight_gpus_and_a_synchronous_run_waits_for_its_tail() -> None:
    ahead, synchronous = simulate(8), simulate(8, max_staleness=0)
    assert ahead.efficiency >= 0.95
    assert synchronous.efficiency < ahead.efficiency - 0.01
    assert ahead.efficiency <= 1.0


@pytest.mark.usefixtures("few_episodes")
def test_gpus_that_only_learn_or_only_act_are_split_by_what_each_costs() -> None:
    assert num_learning_gpus(8) == 6
    assert simulate(8, 6).efficiency > simulate(8, 4).efficiency + 0.1


def test_lengths_of_episodes_have_the_mean_that_the_page_names() -> None:
    seeds = random.Random(0)
    drawn = [measured.num_decisions(seeds.getrandbits(62)) for _ in range(20_000)]
    assert max(drawn) == measured.MOST_DECISIONS
    assert sum(drawn) / len(drawn) == pytest.approx(25.0, abs=0.3)


def test_numbers_that_were_not_asked_for_are_null_with_the_reason() -> None:
    figures = figures_of([])
    keys = [key for keys in PARTS.values() for key in keys]
    assert set(KEYS) < set(keys)
    assert list(figures) == [*keys, "reasons"]
    assert all(figures[key] is None for key in keys)
    reasons = figures["reasons"]
    assert isinstance(reasons, dict)
    assert reasons["efficiency_8"] == "not asked for: --simulate"
