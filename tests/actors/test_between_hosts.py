"""Two network namespaces as two hosts: actors there work as here, until the cable is pulled."""

import asyncio
import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sample_actors import Counter

from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from vla_rl.actors import RemoteHost, Runtime, make_keys, read_keys, read_public_key
from vla_rl.errors import ActorDied


@pytest.fixture
def far() -> Iterator[NamespaceHost]:
    """Another host than the one that this test runs on."""
    with contextlib.ExitStack() as opened:
        try:
            near, other = opened.enter_context(network_namespaces(2))
        except NamespacesRefused as reason:
            pytest.skip(str(reason))
        opened.enter_context(near.entered())
        yield other


@pytest.fixture
def placement(
    far: NamespaceHost, tmp_path: Path, program_environment: dict[str, str]
) -> RemoteHost:
    keys = tmp_path / "keys"
    make_keys(keys)
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", f"tcp://{far.address}:0"]
    command += ["--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")]
    command += ["--lost-after", "3"]
    server = far.popen(command, stdout=subprocess.PIPE, text=True, env=program_environment)
    assert server.stdout is not None
    with server.stdout as words:
        address = words.readline().split()[-1]
    return RemoteHost(
        address=address,
        server_public_key=read_public_key(keys / "server.pub"),
        client_keys=read_keys(keys / "client.key"),
        lost_after_s=3.0,
    )


@pytest.mark.needs_root
async def test_a_pulled_cable_fails_the_calls_here_and_ends_the_actor_there(
    far: NamespaceHost, placement: RemoteHost
) -> None:
    async with asyncio.timeout(100), Runtime(stop_grace_s=0.5) as runtime:
        counter = await runtime.spawn(Counter, name="far away", placement=placement)
        pixels = np.ones(3_000_000, np.uint8)
        assert np.array_equal(await counter.echo_array(pixels), pixels)
        assert min(far.carried_bytes()) > pixels.nbytes
        actor = os.pidfd_open(await counter.pid())
        pending = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
        await counter.cancelled()
        far.pull_cable()
        with pytest.raises(
            ActorDied, match=r"far away.*connection to tcp://10\.77\.0\.2:.* is lost"
        ):
            await pending
        assert await asyncio.to_thread(select.select, [actor], [], [], 60)
        os.close(actor)
        far.plug_in_cable()
        again = await runtime.spawn(Counter, placement=placement)
        assert await again.add(1) == 1
