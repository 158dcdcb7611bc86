"""CURVE keys, which decide who may use a host.

`python -m vla_rl.actors.keys FOLDER [CLIENT_WITH_TAKEOVER ...]` creates them.

The server needs `server.key` and the clients' `.pub` files; each client needs its own `.key` and
`server.pub`. The `.key` files are secret and readable only by their owner.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from vla_rl.actors.placement import KeyPair, is_key


def make_keys(folder: Path, clients: Sequence[str] = ("client",)) -> None:
    """Write key pairs for clients, and for the server if it has none yet.

    Raises: FileExistsError if a client has one: keys are never replaced.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = clients if (folder / "server.key").exists() else ("server", *clients)
    for name in names:
        public, secret = zmq.curve_keypair()
        pair = KeyPair(public=public.decode(), secret=secret.decode())
        _write_once(folder / f"{name}.key", msgspec.json.encode(pair), 0o600)
        _write_once(folder / f"{name}.pub", pair.public.encode() + b"\n", 0o644)


def read_keys(file: Path) -> KeyPair:
    """Read a key pair from a `.key` file. Raises: ValueError for any other file."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=KeyPair)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a key file: {error}. Make one with `python -m vla_rl.actors.keys`."
        ) from error
    if not (is_key(found.public) and is_key(found.secret)):
        raise ValueError(
            f"{file} holds keys of {len(found.public)} and {len(found.secret)} characters, expected "
            "two of 40 characters of Z85. Make them with `python -m vla_rl.actors.keys`."
        )
    return found


def read_public_key(file: Path) -> str:
    """Read a public key from a `.pub` file. Raises: ValueError for any other file."""
    key = file.read_bytes().decode(errors="replace").strip()
    if not is_key(key):
        raise ValueError(
            f"{file} holds {len(key)} characters, expected a public key of 40 characters of Z85."
        )
    return key


def _write_once(file: Path, content: bytes, mode: int) -> None:
    # Not `zmq.auth.create_certificates`, which replaces a key that is there, and makes the secret one
    # readable for others until somebody changes its mode. Nor could it read files of earlier versions.
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as opened:
        opened.write(content)


def main() -> int:
    """Run `make_keys` from the command line."""
    import argparse  # here: each process of a run would wait for its import

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "clients", nargs="*", default=["client"], help="names of the clients; default: client"
    )
    options = parser.parse_args()
    try:
        make_keys(options.folder, options.clients)
    except OSError as error:
        print(
            f"error: {error}; keys are never replaced: remove them, or choose other names",
            file=sys.stderr,
        )
        return 2
    print(f"{options.folder} has keys of the server and of {', '.join(options.clients)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
