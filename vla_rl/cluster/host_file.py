"""The file that lists the hosts of a run, in TOML.

    client_key = "keys/client.key"        # our own keys; default: ~/.vla_rl/keys/client.key
    interface = "ib0"                     # of our learner ranks; default: the one towards the others

    [[host]]
    name = "gpu2"
    address = "tcp://10.0.0.2:7070"       # these two lines are printed by `vla-rl host` there
    public_key = "..."                    # or a file that ends in .pub
    cores = 16                            # optional limits; default: all that the host has
    memory_gib = 64
    interface = "ib0"                     # of its learner ranks; default: the one of the address
    gpus = "0-5"                          # of those that the host reports; or with name and memory:
    gpus = [{ name = "H200", memory_gib = 139 }]

Paths are relative to the file.
"""

import codecs
import difflib
import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.actors import RemoteHost, read_keys, read_public_key
from vla_rl.actors.placement import LOST_AFTER_S, KeyPair
from vla_rl.cluster.hosts import Gpu, HostResources
from vla_rl.cluster.layout import parse_gpu_range
from vla_rl.errors import ConfigError

KEYS: Final = Path("~/.vla_rl/keys")
"""Folder of this user's keys, unless another one is given."""

_GIB: Final = 2**30

LOCAL_HOST: Final = "here"
"""Name of the control process's own host among those that run episodes."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class ListedGpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU as the file lists it."""

    name: str
    memory_gib: float


class ListedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[host]]` table."""

    name: str
    address: str
    public_key: str
    cores: int | None = None
    memory_gib: float | None = None
    gpus: list[ListedGpu] | str | None = None
    lost_after_s: float = LOST_AFTER_S
    interface: str = ""
    """Network interface of its learner ranks; empty for the one that has the address."""

    def apply_limits(self, there: HostResources) -> HostResources:
        """Return what a run may use of the resources that the host reports.

        Raises: ConfigError naming a GPU that the host does not have.
        """
        memory = there.memory_bytes
        if self.memory_gib is not None:
            memory = min(memory, int(self.memory_gib * _GIB))
        return HostResources(
            num_cores=there.num_cores if self.cores is None else self.cores,
            memory_bytes=memory,
            gpus=self._gpus(there.gpus),
        )

    def get_declared(self, unknown: HostResources) -> HostResources:
        """Return what the file declares of a host that does not answer.

        Args:
            unknown: what counts for a host of which nothing is declared.
        """
        listed = range(1 + max(self.list_indices(), default=-1))
        gpus = tuple(Gpu(name="a GPU", memory_bytes=unknown.memory_bytes) for _ in listed)
        return self.apply_limits(
            HostResources(num_cores=unknown.num_cores, memory_bytes=unknown.memory_bytes, gpus=gpus)
        )

    def _gpus(self, there: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if self.gpus is None:
            return there
        if not isinstance(self.gpus, str):
            return tuple(
                Gpu(name=gpu.name, memory_bytes=int(gpu.memory_gib * _GIB), device=str(index))
                for index, gpu in enumerate(self.gpus)
            )
        indices = self.list_indices()
        if indices and max(indices) >= len(there):
            raise ConfigError(
                f"host {self.name!r} has {len(there)} GPUs, expected GPU {max(indices)} too, which "
                f"gpus = {self.gpus!r} lists; list GPUs that are there"
            )
        return tuple(there[index] for index in indices)

    def list_indices(self) -> tuple[int, ...]:
        """Return the numbers of GPUs that `gpus` lists as ranges. Raises: ConfigError."""
        if not self.gpus or not isinstance(self.gpus, str):
            return ()
        (part,) = parse_gpu_range(f"{self.name}:{self.gpus}")
        return part.gpus or ()


class HostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    host: list[ListedHost]
    client_key: str = str(KEYS / "client.key")
    interface: str = ""


class KnownHost(msgspec.Struct, frozen=True):
    """A host of the file with its keys read."""

    listed: ListedHost
    placement: RemoteHost


def read_host_file(path: Path) -> tuple[KnownHost, ...]:
    """Read the hosts and the keys that the file names; connects to nothing.

    Raises: ConfigError naming the file, and the key, the host or the key file that is wrong.
    """
    file = _read(path)
    keys = _read_client_keys(path, file.client_key)
    return tuple(KnownHost(host, _make_placement(path, host, keys)) for host in file.host)


def read_interfaces(path: Path) -> dict[str, str]:
    """Return the network interface that the file names for each host, and for this one by "".

    It is empty where the file names none. Raises: as `read_host_file`.
    """
    file = _read(path)
    return {"": file.interface, **{host.name: host.interface for host in file.host}}


def _read(path: Path) -> HostFile:
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(
            f"the list of hosts {path} cannot be read: {error.strerror}; expected a TOML file with "
            "a [[host]] table for each host, whose lines `vla-rl host` prints there"
        ) from error
    try:
        file = msgspec.toml.decode(content, type=HostFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}{_suggest_key(str(error))}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if not file.host:
        raise ConfigError(f"{path} lists no host, expected at least one [[host]] table")
    for host in file.host:
        # names are parts of metrics' names
        if not _NAME.fullmatch(host.name) or host.name == LOCAL_HOST:
            raise ConfigError(
                f"{path} has a host with the name {host.name!r}, expected letters, digits, '-', '_' "
                f"and '.', and not {LOCAL_HOST!r}, which is this host"
            )
        try:
            host.list_indices()
        except ConfigError as error:
            raise ConfigError(
                f"{path}, host {host.name!r}: gpus is {host.gpus!r}, expected numbers of GPUs such "
                'as "0-5,7", or [] for none'
            ) from error
    _require_unique(path, [host.name for host in file.host], "name")
    _require_unique(path, [host.address for host in file.host], "address")
    return file


def _make_placement(path: Path, host: ListedHost, keys: KeyPair) -> RemoteHost:
    try:
        return RemoteHost(
            address=host.address,
            server_public_key=resolve_public_key(host.public_key, path.parent),
            client_keys=keys,
            lost_after_s=host.lost_after_s,
        )
    except ValueError as error:
        raise ConfigError(f"{path}, host {host.name!r}: {error}") from error


def resolve_public_key(text: str, folder: Path) -> str:
    """Return a public key, given as its 40 characters or as a file that ends in .pub.

    Raises: ValueError if it is neither.
    """
    if not text.endswith(".pub"):
        if len(text) != 40:
            raise ValueError(
                f"the public key {text!r} has {len(text)} characters, expected 40, or a file that "
                "ends in .pub"
            )
        return text
    try:
        return read_public_key(folder / Path(os.path.expanduser(text)))
    except OSError as error:
        raise ValueError(f"the key file {text} cannot be read: {error.strerror}") from error


def _read_client_keys(path: Path, file: str) -> KeyPair:
    key_file = path.parent / Path(os.path.expanduser(file))
    try:
        return read_keys(key_file)
    except OSError as error:
        raise ConfigError(
            f"{path}: our keys {key_file} cannot be read: {error.strerror}; make them with "
            "`vla-rl host --show-key`, or set client_key to another .key file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _require_unique(path: Path, values: list[str], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(
                f"{path} lists {values.count(value)} hosts with the {what} {value!r}, expected a "
                f"{what} of its own for each"
            )


def _suggest_key(error: str) -> str:
    """Return the key that was probably meant by an unknown one, in words."""
    unknown = re.search(r"unknown field `(\w+)`", error)
    if unknown is None:
        return ""
    kinds: tuple[Any, ...] = (ListedHost, HostFile, ListedGpu)
    known = sorted({name for kind in kinds for name in kind.__struct_fields__})
    near = difflib.get_close_matches(unknown[1], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
