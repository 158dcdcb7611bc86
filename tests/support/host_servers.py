"""Host servers, in this loop or as machines of their own that can be killed, with the list that names them."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from vla_rl.actors import make_keys, read_keys
from vla_rl.actors.host import HostServer


@asynccontextmanager
async def loopback_hosts(folder: Path, number: int = 1) -> AsyncIterator[Path]:
    """Serve `far1`, `far2`, ... at ports of this machine; yield the list of hosts."""
    make_keys(folder / "keys")
    keys, client = (read_keys(folder / f"keys/{name}.key") for name in ("server", "client"))
    lines = ['client_key = "keys/client.key"\n']
    async with AsyncExitStack() as stack:
        for k in range(1, number + 1):
            opened = HostServer("tcp://127.0.0.1:0", keys, [client.public], lost_after_s=20.0)
            server = await stack.enter_async_context(opened)
            # a busy machine may hold up any thread for seconds; a closed connection is seen at once
            lines.append(
                f'[[host]]\nname = "far{k}"\naddress = "{server.address}"\n'
                'public_key = "keys/server.pub"\nlost_after_s = 20.0\n'
            )
        path = folder / "hosts.toml"
        path.write_text("".join(lines))
        yield path


class ServedHost:
    """`vla-rl host` at an address, `host:port`; `popen` starts it there."""

    def __init__(
        self,
        name: str,
        address: str,
        keys: Path,
        popen: Callable[..., "subprocess.Popen[Any]"] = subprocess.Popen,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._address, self._keys, self._popen = name, address, keys, popen
        self._env = env
        self.table = ""

    def start(self) -> None:
        """Start it, and keep the lines that it prints for the list of hosts."""
        command = [sys.executable, "-m", "vla_rl.cli.host", "--keys", str(self._keys)]
        bind = ["--bind", f"tcp://{self._address}", "--lost-after", "30"]
        self.server = self._popen(
            [*command, *bind], stdout=subprocess.PIPE, text=True, env=self._env
        )
        assert self.server.stdout is not None
        lines: list[str] = []
        for line in self.server.stdout:
            if line.startswith("serving"):
                break
            lines.append(line)
        first = lines.index("[[host]]\n")
        # a busy machine may hold up any thread for seconds; a closed connection is seen at once
        self.table = "".join(lines[first:]) + "lost_after_s = 20.0\n"
        self.table = self.table.replace(self._address.partition(":")[0], self.name, 1)

    def kill(self) -> None:
        """Kill it, as if the machine had lost its power."""
        self.server.kill()
        self.server.communicate()


def on_loopback(name: str, keys: Path, env: Mapping[str, str] | None = None) -> ServedHost:
    """A host at a free port of this machine, not started; `env` is its environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return ServedHost(name, f"127.0.0.1:{probe.getsockname()[1]}", keys, env=env)


def start_and_list(hosts: Sequence[ServedHost], folder: Path) -> Path:
    """Start these hosts, and write their list."""
    for host in hosts:
        host.start()
    path = folder / "hosts.toml"
    tables = "".join(host.table for host in hosts)
    path.write_text(f'client_key = "{folder}/keys/client.key"\n{tables}')
    return path
