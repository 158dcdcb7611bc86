"""`vla-rl host` in namespaces, and the list of such hosts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.hosts.namespaces import NamespaceHost
from vla_rl.actors import make_keys

_ROOT: Final = Path(__file__).parents[2]


class NamespaceRunner:
    """`vla-rl host` in a namespace of its own.

    Args:
        name: in the list of hosts.
        namespace: where it serves.
        folder: of the keys and of what it prints.
        lost_after_s: silence after which it and its clients are lost for each other.
        env: environment of its processes.

    Attributes:
        ready_at_s: when it began to serve, by the clock of the machine.
        table: its lines for the list of hosts.
    """

    def __init__(
        self,
        name: str,
        namespace: NamespaceHost,
        folder: Path,
        lost_after_s: float,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.name, self.namespace = name, namespace
        self._folder, self._lost_after_s = folder, lost_after_s
        path = os.pathsep.join([str(_ROOT), env.get("PYTHONPATH", "")])
        self._env = {**env, "PYTHONPATH": path}
        self.ready_at_s = 0.0
        self.table = ""

    def begin(self) -> None:
        """Start it, from a thread that stays: the kernel kills it with the thread."""
        command = [sys.executable, "-m", "vla_rl.cli.host"]
        command += ["--keys", str(self._folder / "keys"), "--lost-after", str(self._lost_after_s)]
        command += ["--bind", f"tcp://{self.namespace.address}:7070"]
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self.server = self.namespace.popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env
            )

    def until_ready(self) -> None:
        """Wait until it serves, and keep the lines that it prints."""
        assert self.server.stdout is not None
        lines: list[str] = []
        for line in self.server.stdout:
            if line.startswith("serving"):
                break
            lines.append(line)
        self.ready_at_s = time.monotonic()
        first = lines.index("[[host]]\n")
        table = "".join(lines[first:]) + f"lost_after_s = {self._lost_after_s}\n"
        self.table = table.replace(self.namespace.address, self.name, 1)

    def kill(self) -> None:
        """Kill its server, as `kill -9` does; what it has started dies with it."""
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()


@contextlib.contextmanager
def start_hosts(
    namespaces: Sequence[NamespaceHost],
    folder: Path,
    lost_after_s: float,
    env: Mapping[str, str] = os.environ,
) -> Iterator[list[NamespaceRunner]]:
    """Serve on every namespace while the block is open; hosts are named `host1`, `host2`, ..."""
    make_keys(folder / "keys")
    with contextlib.ExitStack() as stack:
        hosts = []
        # at the same time: each imports for seconds
        for number, namespace in enumerate(namespaces, 1):
            host = NamespaceRunner(f"host{number}", namespace, folder, lost_after_s, env)
            host.begin()
            stack.callback(host.kill)
            hosts.append(host)
        for host in hosts:
            host.until_ready()
        yield hosts


def write_list(folder: Path, hosts: Sequence[NamespaceRunner]) -> Path:
    """Write the list of hosts, whose lines they printed; return its path."""
    path = folder / "hosts.toml"
    # whole at once: a run that is open reads it again
    new_file = path.with_suffix(".new")
    tables = "".join(host.table for host in hosts)
    new_file.write_text(f'client_key = "{folder}/keys/client.key"\n{tables}')
    return new_file.rename(path)
