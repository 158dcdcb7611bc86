"""Hosts of a run: this one alone, those in a file, those that another part of the run has opened."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

import vla_rl.cluster.listed_hosts
from vla_rl.actors import make_keys, read_keys, read_public_key
from vla_rl.actors.host import HostServer
from vla_rl.cluster.host_file import read_host_file
from vla_rl.cluster.hosts import (
    Gpu,
    Host,
    HostChange,
    HostResources,
    Joined,
    Left,
    OpenHosts,
    ThisHost,
    make_own_report,
    parse_visible_gpus,
    require_same_versions,
)
from vla_rl.cluster.listed_hosts import ListedHosts
from vla_rl.errors import ConfigError


async def test_by_default_there_is_this_host_and_it_never_changes() -> None:
    async with ThisHost() as hosts:
        (host,) = hosts.hosts()
        assert host.placement is None
        assert host.resources.num_cores == len(os.sched_getaffinity(0))
        assert host.resources.memory_bytes > 1 << 30
        assert [change async for change in hosts.changes()] == []


async def test_resources_that_are_given_are_those_of_this_host() -> None:
    resources = HostResources(num_cores=3, memory_bytes=5 << 30)
    async with ThisHost(resources) as hosts:
        assert hosts.hosts()[0].resources == resources


LISTED = """0, GPU-aaa, NVIDIA H200, 143771
1, GPU-bbb, NVIDIA H200, 143771
2, GPU-ccc, NVIDIA L4, 23034
3, GPU-ddd, NVIDIA GB10, [N/A]
"""


def test_a_gpu_has_a_name_its_memory_and_its_number() -> None:
    first, *_, last = parse_visible_gpus(LISTED, None)
    assert first == Gpu(name="NVIDIA H200", memory_bytes=143771 << 20, device="0")
    # the fourth does not report its memory
    assert (last.name, last.device) == ("NVIDIA L4", "2")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("1,9,2", ["1"]), ("", []), ("-1", [])],
)
def test_only_the_gpus_that_cuda_shows_are_used_in_its_order(
    visible: str, expected: list[str]
) -> None:
    assert [gpu.device for gpu in parse_visible_gpus(LISTED, visible)] == expected


def test_a_machine_without_gpus_has_none() -> None:
    assert parse_visible_gpus("", None) == ()


def host(name: str) -> Host:
    return Host(name=name, resources=HostResources(num_cores=1, memory_bytes=1))


class Owner:
    """Hosts whose changes were written down."""

    def __init__(self, there: tuple[Host, ...], *changes: HostChange) -> None:
        self._there, self._changes = there, changes
        self.is_open = True

    def hosts(self) -> tuple[Host, ...]:
        return self._there

    async def changes(self) -> AsyncIterator[HostChange]:
        for change in self._changes:
            yield change

    async def __aenter__(self) -> "Owner":
        raise AssertionError("its owner has entered it")

    async def __aexit__(self, *error: object) -> None:
        self.is_open = False


async def test_a_change_from_before_the_block_is_not_reported_again() -> None:
    a, b, c = host("a"), host("b"), host("c")
    # b joined before the block and c had left before it; then a leaves, and c comes back
    owner = Owner(
        (a, b),
        Joined(host=b),
        Left(host=c, cause="gone"),
        Left(host=a, cause="gone"),
        Joined(host=c),
        Left(host=c, cause="gone"),
    )
    async with OpenHosts(owner) as opened:
        assert opened.hosts() == (a, b)
        seen = [(type(change).__name__, change.host.name) async for change in opened.changes()]
    assert seen == [("Left", "a"), ("Joined", "c"), ("Left", "c")]


async def test_leaving_the_block_leaves_the_hosts_to_their_owner() -> None:
    owner = Owner((host("a"),))
    async with OpenHosts(owner):
        pass
    assert owner.is_open


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Site:
    """Keys, a list with one host, and the server that it names."""

    def __init__(self, folder: Path) -> None:
        make_keys(folder / "keys")
        self.keys, self.address = folder / "keys", free_address()
        self.path = folder / "hosts.toml"
        self.path.write_text(
            'client_key = "keys/client.key"\n[[host]]\nname = "far"\ncores = 3\n'
            f'address = "{self.address}"\npublic_key = "keys/server.pub"\n'
        )

    def server(self) -> HostServer:
        allowed = [read_public_key(self.keys / "client.pub")]
        return HostServer(self.address, read_keys(self.keys / "server.key"), allowed)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_a_host_that_leaves_and_comes_back_is_reported(site: Site) -> None:
    hosts = ListedHosts(site.path, look_every_s=0.05)
    async with asyncio.timeout(60), AsyncExitStack() as servers:
        server = await servers.enter_async_context(AsyncExitStack())
        await server.enter_async_context(site.server())
        async with hosts:
            local, remote = hosts.hosts()
            assert (local.placement, remote.name, remote.resources.num_cores) == (None, "far", 3)
            changes = hosts.changes()
            await server.aclose()
            left = await anext(changes)
            assert isinstance(left, Left)
            assert (left.host.name, len(hosts.hosts())) == ("far", 1)
            await servers.enter_async_context(site.server())
            joined = await anext(changes)
            assert isinstance(joined, Joined)
            assert joined.host == hosts.hosts()[1] == remote
        assert [change async for change in changes] == []


async def test_a_host_that_is_added_to_the_file_joins(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        asyncio.timeout(60),
        site.server(),
        ListedHosts(site.path, look_every_s=0.02) as hosts,
    ):
        listed = site.path.read_text()
        site.path.write_text("[[host]\n")
        while "is not used" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        # the same machine under another name and address
        other = listed[listed.index("[[host]]") :].replace('"far"', '"further"')
        site.path.write_text(listed + other.replace("127.0.0.1", "localhost"))
        joined = await anext(hosts.changes())
        assert (type(joined), joined.host.name) == (Joined, "further")
        assert [host.name for host in hosts.hosts()] == ["this host", "far", "further"]


async def test_a_host_that_does_not_answer_is_named_with_what_to_do(site: Site) -> None:
    hosts = ListedHosts(site.path, answer_within_s=0.2)
    with pytest.raises(ConfigError, match=rf"host 'far' at {site.address}.*`vla-rl host`"):
        async with hosts:
            pass


async def test_a_host_that_does_not_know_our_key_says_so(site: Site) -> None:
    make_keys(site.keys, ("other",))
    text = site.path.read_text()
    site.path.write_text(text.replace("client.key", "other.key"))
    async with asyncio.timeout(60), site.server():
        with pytest.raises(ConfigError, match="rejected our key"):
            async with ListedHosts(site.path):
                pass


async def test_a_host_with_another_version_is_refused_by_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = make_own_report()
    ours = replace(report, versions={**report.versions, "torch": "9.9.9"})
    monkeypatch.setattr(vla_rl.cluster.listed_hosts, "make_own_report", lambda: ours)
    async with asyncio.timeout(60), site.server():
        with pytest.raises(ConfigError, match=r"host 'far' has torch .* \(here 9\.9\.9\)"):
            async with ListedHosts(site.path):
                pass


def test_every_version_that_differs_is_named() -> None:
    local = make_own_report()
    require_same_versions("a", local, local)
    there = replace(local, versions={"vla_rl": "0.0.1", "torch": "none"})
    with pytest.raises(ConfigError, match=r"'a' has vla_rl 0\.0\.1 .*torch none .*python None"):
        require_same_versions("a", there, local)


HOST = 'name = "a"\naddress = "tcp://10.0.0.2:7070"\npublic_key = "keys/server.pub"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path


def written(folder: Path, *hosts: str, head: str = 'client_key = "keys/client.key"\n') -> Path:
    path = folder / "hosts.toml"
    path.write_text(head + "".join(f"[[host]]\n{host}" for host in hosts))
    return path


def test_a_host_is_read_with_its_keys_and_limits(folder: Path) -> None:
    limits = 'cores = 4\nmemory_gib = 2\ngpus = [{ name = "H200", memory_gib = 139 }]\n'
    (known,) = read_host_file(written(folder, HOST + limits))
    assert known.placement.address == "tcp://10.0.0.2:7070"
    assert known.placement.server_public_key == read_public_key(folder / "keys" / "server.pub")
    there = HostResources(num_cores=64, memory_bytes=64 << 30)
    assert known.listed.apply_limits(there) == HostResources(
        num_cores=4,
        memory_bytes=2 << 30,
        gpus=(Gpu(name="H200", memory_bytes=139 << 30, device="0"),),
    )


def test_a_file_may_begin_with_the_mark_that_editors_of_windows_write(folder: Path) -> None:
    path = written(folder, HOST)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(read_host_file(path)) == 1


def test_gpus_are_listed_as_ranges_of_those_that_the_host_reports(folder: Path) -> None:
    gpus = tuple(Gpu(name="H200", memory_bytes=139 << 30, device=str(k)) for k in range(4))
    there = HostResources(num_cores=64, memory_bytes=64 << 30, gpus=gpus)
    for words, expected in (("0-1,3", (gpus[0], gpus[1], gpus[3])), ("", ())):
        (known,) = read_host_file(written(folder, HOST + f'gpus = "{words}"\n'))
        assert known.listed.apply_limits(there).gpus == expected
    (known,) = read_host_file(written(folder, HOST + 'gpus = "2-7"\n'))
    with pytest.raises(ConfigError, match=r"host 'a' has 4 GPUs, expected GPU 7 too, which gpus"):
        known.listed.apply_limits(there)
    # of a host that does not answer, the file's word is taken
    assert len(known.listed.get_declared(HostResources(num_cores=1, memory_bytes=1)).gpus) == 6


def test_without_limits_a_run_may_use_all_that_the_host_reports(folder: Path) -> None:
    (known,) = read_host_file(written(folder, HOST))
    there = HostResources(num_cores=64, memory_bytes=64 << 30)
    assert known.listed.apply_limits(there) == there


@pytest.mark.parametrize(
    ("hosts", "head", "expected"),
    [
        ((HOST + "core = 4\n",), None, r"unknown field `core`.*did you mean 'cores'"),
        ((HOST, HOST), None, r"lists 2 hosts with the name 'a'"),
        (
            (HOST, HOST.replace('"a"', '"b"')),
            None,
            r"2 hosts with the address 'tcp://10.0.0.2:7070'",
        ),
        ((HOST.replace('"a"', '"here"'),), None, r"name 'here', expected letters"),
        ((HOST.replace('"a"', '"a b"'),), None, r"name 'a b', expected letters"),
        ((HOST.replace("keys/server", "gone"),), None, r"host 'a': the key file gone.pub"),
        ((HOST.replace("keys/server.pub", "abc"),), None, r"host 'a': .*3 characters, expected 40"),
        ((HOST.replace("tcp://", ""),), None, r"host 'a': address is"),
        ((HOST,), 'client_key = "gone.key"\n', r"make them with `vla-rl host --show-key`"),
        ((HOST + 'gpus = "0-x"\n',), None, r"host 'a': gpus is '0-x', expected num"),
        (("name = 3\n",), None, r"Expected `str`"),
        (("name\n",), None, r"is not TOML"),
        ((), "host = []\n", r"lists no host"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(
    folder: Path, hosts: tuple[str, ...], head: str | None, expected: str
) -> None:
    path = written(folder, *hosts) if head is None else written(folder, *hosts, head=head)
    with pytest.raises(ConfigError, match=expected) as raised:
        read_host_file(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        read_host_file(tmp_path / "nowhere.toml")
