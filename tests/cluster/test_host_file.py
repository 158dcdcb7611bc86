"""The list of hosts: what it says, and the errors that name what is wrong in it."""

from pathlib import Path

import pytest

from vla_rl.actors import make_keys, read_public_key
from vla_rl.cluster import Gpu, HostResources
from vla_rl.cluster.host_file import read_host_file
from vla_rl.errors import ConfigError

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
