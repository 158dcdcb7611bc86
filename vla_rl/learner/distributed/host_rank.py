"""The part of a rank that matters on another host: its files, network, clock, code.

policy's files ─────────────► folder of the host's first rank ◄── all ranks of the host
ranges of a checkpoint ─────►   (files with holes: only what these ranks read was sent)
staged state ◄─────────────── pieces, which the learner's process writes into its checkpoint

All hosts need the same code: ranks that differ would add up nonsense.
"""

import asyncio
import hashlib
import os
import platform
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

import vla_rl
from vla_rl.actors import Actor
from vla_rl.errors import ConfigError
from vla_rl.learner.distributed.rendezvous import Network, Rendezvous, RendezvousServer
from vla_rl.learner.distributed.state import write_at
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders

FOLDER_PREFIX: Final = "vla_rl-rank-files-"
"""Beginning of the names of folders with files that were brought to another host."""

PIECE_BYTES: Final = 16 << 20
"""Bytes of a file or of weights in one message."""


class FilePiece(msgspec.Struct, frozen=True):
    """Bytes for a file, in runs that begin at equal distances."""

    at: int
    """Offset of the first byte in the file."""

    run: int
    distance: int
    data: np.ndarray


class HostRank(Actor):
    """A rank's files, network and clock on its host."""

    def __init__(self) -> None:
        self._brought: OwnedFolder | None = None
        self._rendezvous_server: RendezvousServer | None = None

    async def code(self, policy_class: str) -> dict[str, str]:
        """Return versions and digests of the code here, by name."""
        return await asyncio.to_thread(code_report, policy_class)

    async def now(self) -> float:
        """Return this host's clock, in seconds."""
        return time.monotonic()

    async def open_rendezvous(self, network: Network, port: int, num_ranks: int) -> Rendezvous:
        """Wait at a port for the other ranks; for rank 0. Raises: ConfigError."""
        self._rendezvous_server = await asyncio.to_thread(
            RendezvousServer, network, port, num_ranks
        )
        return self._rendezvous_server.rendezvous

    async def write_piece(self, name: str, size: int, start: int, piece: np.ndarray) -> str:
        """Write a piece of a file; what was not sent of it reads as zeros.

        Args:
            name: of the file, below this rank's folder.
            size: bytes of the whole file.
            start: offset of the piece.
            piece: uint8 [bytes].

        Returns: the path of the file here. Raises: ValueError for a path outside of the folder.
        """
        return await asyncio.to_thread(self._write_piece, name, size, start, piece)

    async def remove_files(self) -> None:
        """Remove the files that were brought."""
        brought, self._brought = self._brought, None
        if brought is not None:
            await asyncio.to_thread(brought.remove_folder)

    async def on_stop(self) -> None:
        """Remove the files that were brought."""
        await self.remove_files()

    def _write_piece(self, name: str, size: int, start: int, piece: np.ndarray) -> str:
        if self._brought is None:
            # those of killed ranks go first: 15 GB of a 7B would stay on the disk of their
            # host
            remove_abandoned_folders(FOLDER_PREFIX)
            self._brought = OwnedFolder(FOLDER_PREFIX)
        folder = self._brought.path
        path = folder / name
        # names come over the wire; one with `..` in it would write where it likes
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"the file {name!r} is outside of the rank's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # a file with holes: of a checkpoint only the bytes that these ranks read are sent, to
            # their own offsets
            if os.fstat(descriptor).st_size != size:
                os.truncate(descriptor, size)
            write_at(descriptor, piece, start)
        finally:
            os.close(descriptor)
        return str(path)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same bytes as rising ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(each for each in ranges if each[1] > each[0]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def split_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same ranges, none longer than `PIECE_BYTES`."""
    return [
        (at, min(at + PIECE_BYTES, end))
        for begin, end in ranges
        for at in range(begin, end, PIECE_BYTES)
    ]


def read_bytes(path: Path, begin: int, end: int) -> np.ndarray:
    """Read bytes of a file, uint8 [end - begin]. Raises: OSError if they are not there."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    if len(data) != end - begin:
        raise OSError(f"{path} ends at byte {begin + len(data)}, expected {end}")
    return np.frombuffer(data, np.uint8)


PACKAGES: Final = ("torch", "numpy", "transformers")
"""Packages whose versions must be equal, builds included."""


def code_report(policy_class: str) -> dict[str, str]:
    """Return versions of packages and digests of sources here, by name.

    Args:
        policy_class: `module:Class` of the policy.
    """
    module = policy_class.partition(":")[0]
    # releases of one minor version compute alike; other builds of torch do not
    python = ".".join(platform.python_version_tuple()[:2])
    report = {"python": python, "vla_rl's sources": _digest_package()}
    report |= {package: _package_version(package) for package in PACKAGES}
    if not module.startswith("vla_rl."):
        report[f"module {module}"] = _digest_module(module)
    return report


def require_same_code(host: str, remote: dict[str, str], local: dict[str, str]) -> None:
    """Raise ConfigError that names each thing in which the ranks' host differs from this one."""
    different = [
        f"{name} {remote.get(name, 'none')} (here {found})"
        for name, found in local.items()
        if remote.get(name) != found
    ]
    if different:
        raise ConfigError(
            f"host {host!r} has {', '.join(different)}; expected the same code on all hosts that "
            "learn. Install the same there, and start `vla-rl host` again"
        )


@cache
def _digest_package() -> str:
    folder = Path(vla_rl.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    # sources and not the version: two checkouts of one version differ, and their sums of gradients
    # would be nonsense without an error
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest_module(name: str) -> str:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "none"
    return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=6).hexdigest()


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
