"""Let this machine run episodes of a run that is controlled from another one: `vla-rl host`.

The first start makes keys in ~/.vla_rl/keys. Then it prints the lines for the list of hosts that
--cluster.hosts names on the other machine, and serves until it is stopped.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from vla_rl.actors.host import port_range, serve
from vla_rl.actors.keys import make_keys, read_keys
from vla_rl.actors.placement import LOST_AFTER_S
from vla_rl.cluster.host_file import KEYS, resolve_public_key
from vla_rl.errors import ConfigError
from vla_rl.run.terminal import lasting_output

PORT: Final = 7070


@lasting_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Make keys, print what the other side needs, and serve; return the exit status."""
    options = _parser().parse_args(arguments)
    folder = Path(os.path.expanduser(options.keys))
    try:
        _make_missing(folder)
        if options.show_key:
            print(read_keys(folder / "client.key").public)
            return 0
        # a folder of keys that both machines see needs no --allow
        allowed = options.allow or [str(folder / "client.pub")]
        public = [resolve_public_key(key, Path()) for key in allowed]
        keys = read_keys(folder / "server.key")
        _print_lines(options.bind, keys.public)
        uvloop.run(serve(options.bind, keys, public, options.lost_after, options.ports))
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vla-rl host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--allow",
        nargs="+",
        metavar="KEY",
        help="public keys that may use this machine, or .pub files: `vla-rl host --show-key` prints "
        "that of the other machine. Such a client can run any importable actor as this user. "
        "Default: client.pub of the folder of keys",
    )
    parser.add_argument(
        "--bind",
        default=f"tcp://*:{PORT}",
        help="tcp://interface:port to serve on; only known keys are answered (default: %(default)s)",
    )
    parser.add_argument(
        "--keys", type=Path, default=KEYS, help="folder of keys (default: %(default)s)"
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=LOST_AFTER_S,
        metavar="SECONDS",
        help="silence after which the other machine is lost and its processes are killed (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--ports",
        type=port_range,
        default=(0, 0),
        metavar="FIRST-LAST",
        help="ports of the actors, each of which listens at its own; a firewall has to admit them "
        "besides the server's (default: any free port)",
    )
    parser.add_argument(
        "--show-key", action="store_true", help="print this machine's public key, and end"
    )
    return parser


def _make_missing(folder: Path) -> None:
    """Make the keys of a server and of a client, unless they are there."""
    if not (folder / "client.key").exists():
        make_keys(folder)
    elif not (folder / "server.key").exists():
        make_keys(folder, ())


def _print_lines(bind: str, public_key: str) -> None:
    interface, _, port = bind.removeprefix("tcp://").rpartition(":")
    address = own_address() if interface in ("*", "0.0.0.0") else interface
    print("add this to the list of hosts on the other machine (a name of its own for each):")
    print(f'[[host]]\nname = "{address}"')
    print(f'address = "tcp://{address}:{port}"')
    print(f'public_key = "{public_key}"', flush=True)


if __name__ == "__main__":
    sys.exit(main())


def own_address() -> str:
    """Return the address of the interface that leads outside; the machine's name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # chooses an interface and sends nothing: a datagram socket only notes the address,
            # which is one that RFC 5737 keeps for documentation
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address
