"""How the ranks find each other: by a file on one host, by a port of rank 0's host on several.

    one host        file ◄── all ranks                           loopback interface
    several hosts   rank 0 listens at an address of its own ◄── all others, then all connect to all

On several hosts, only the named interface is used. Neither this store nor gloo nor NCCL encrypts or
asks for a key, so the network has to be one that is trusted.
"""

import os
import socket
from datetime import timedelta
from typing import Final

import msgspec
import psutil
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from vla_rl.errors import ConfigError

LAST_RESORT: Final = timedelta(hours=2)
"""Longest wait of a collective. The learner ends all ranks seconds after one fails; this is for a
learner that itself stands still."""

RENDEZVOUS_TIMEOUT_S: Final = 60.0
"""Time in which all ranks of several hosts must have connected to each other."""

INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL know which interface to use."""


class Rendezvous(msgspec.Struct, frozen=True):
    """The place where the ranks meet."""

    file: str = ""
    """File on the one host of all ranks; empty if they are on several."""

    address: str = ""
    """IP address of rank 0."""

    port: int = 0


class Network(msgspec.Struct, frozen=True):
    """The part of its host's network that a rank uses."""

    address: str
    """IP address or name of its host, as the other hosts know it."""

    interface: str = ""
    """Name of the interface, such as `ib0`; empty for the one that has `address`."""


class RendezvousServer:
    """Rank 0's end of the rendezvous: the store in which the ranks leave their addresses.

    Args:
        network: its host's.
        port: port to listen at; 0 for any that is free.

    Raises: ConfigError if the interface is not there, or the port is in use.
    """

    def __init__(self, network: Network, port: int, num_ranks: int) -> None:
        interface = find_interface(network)
        address = find_address(interface, network)
        listening = socket.socket()
        # a rank that was ended a moment ago leaves the port in a state that only this passes
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, port))
            listening.listen(num_ranks)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"rank 0 cannot wait for the other ranks at {address}, port {port}: "
                f"{error.strerror}; set --cluster.ranks-port to a free port, or to 0 for any"
            ) from error
        port = listening.getsockname()[1]
        # our own socket: the store's own would listen at every interface
        self.store = TCPStore(
            address,
            port,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
            master_listen_fd=listening.detach(),
        )
        self.rendezvous = Rendezvous(address=address, port=port)


def join_group(
    rendezvous: Rendezvous, network: Network | None, rank: int, num_ranks: int, backend: str
) -> None:
    """Join the group of all ranks.

    Args:
        rendezvous: where.
        network: what to use on several hosts; None if all ranks are on this one.
        rank, num_ranks: number of this rank, and of all.
        backend: gloo, or gloo and NCCL.

    Raises: ConfigError if rank 0 cannot be reached, or the interface is not there.
    """
    if network is None:
        # not by a URL: torch would cut the path at a `#` or `?`
        file = FileStore(rendezvous.file, num_ranks)
        file.set_timeout(LAST_RESORT)
        dist.init_process_group(
            backend,
            store=file,
            rank=rank,
            world_size=num_ranks,
            timeout=LAST_RESORT,
        )
        return
    interface = find_interface(network)
    # gloo and NCCL read these variables alone: without them they take the first interface, which
    # may be a public one
    os.environ.update(dict.fromkeys(INTERFACES, interface))
    try:
        store = TCPStore(
            rendezvous.address,
            rendezvous.port,
            num_ranks,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"rank {rank} cannot reach rank 0 at {rendezvous.address}, port {rendezvous.port}, over the "
            f"interface {interface!r} within {RENDEZVOUS_TIMEOUT_S:g} s; let the hosts that learn reach all "
            "of each other's ports, or name another `interface` in the list of hosts (or "
            "--cluster.ray.interface)"
        ) from error
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=LAST_RESORT
    )


def find_interface(network: Network) -> str:
    """Return the interface that a rank uses. Raises: ConfigError if it is not there."""
    there = _addresses()
    if network.interface:
        if network.interface not in there:
            raise ConfigError(
                f"the network interface {network.interface!r} does not exist here; there are "
                f"{_describe_interfaces(there)}. Correct `interface` in the list of hosts (or --cluster.ray.interface)"
            )
        return network.interface
    try:
        address = socket.gethostbyname(network.address)
    except OSError as error:
        raise ConfigError(
            f"the address {network.address!r} of this host cannot be looked up here: {error}; name "
            "its `interface` in the list of hosts (or --cluster.ray.interface)"
        ) from error
    for name, addresses in there.items():
        if address in addresses:
            return name
    raise ConfigError(
        f"no network interface here has the address {address}, by which the other hosts know this "
        f"one; there are {_describe_interfaces(there)}. Name the `interface` in the list of hosts (or "
        "--cluster.ray.interface)"
    )


def find_address(interface: str, network: Network) -> str:
    """Return this host's address on an interface. Raises: ConfigError if it has none."""
    addresses = _addresses()[interface]
    if not addresses:
        raise ConfigError(
            f"the network interface {interface!r} has no IPv4 address, expected one that the other "
            "hosts reach; name another `interface` in the list of hosts (or --cluster.ray.interface)"
        )
    try:
        known = socket.gethostbyname(network.address)
    except OSError:
        known = ""
    return known if known in addresses else addresses[0]


def find_own_address(host: str) -> str:
    """Return the address of this host from which it reaches another. Raises: ConfigError."""
    # a datagram socket connects without a packet: the kernel only looks up its route
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError as error:
            raise ConfigError(f"there is no way from here to {host!r}: {error}") from error
        return str(probe.getsockname()[0])


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface."""
    return {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }


def _describe_interfaces(there: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(found) or '-'})" for name, found in there.items())
