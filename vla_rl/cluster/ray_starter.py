"""Our host server on a node of a Ray cluster, started and ended by a Ray actor there."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from vla_rl.actors.keys import make_keys, read_public_key
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.processes import die_with_parent_only

_PREFIX = "vla_rl-ray-host-"
_SERVING = "serving actors on "


class HostStarter:
    """Starts `python -m vla_rl.actors.host` as its child; Ray runs it as an actor.

    Takes and returns nothing but text and numbers: Ray would pickle anything else. The secret key is
    made here and never leaves the node.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def start(self, interface: str, client_key: str, lost_after_s: float) -> list[str]:
        """Serve on a free port of `interface`; return the address and the server's public key.

        Raises: RuntimeError with the server's last words if it ends.
        """
        remove_abandoned_folders(_PREFIX)
        # the server takes its keys from files; nobody else may enter the folder
        self._folder = OwnedFolder(_PREFIX)
        keys: Path = self._folder.path
        make_keys(keys, clients=())
        (keys / "client.pub").write_text(f"{client_key}\n", encoding="utf-8")
        command = [
            *(sys.executable, "-m", "vla_rl.actors.host", "--bind", f"tcp://{interface}:0"),
            *("--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")),
            *("--lost-after", str(lost_after_s)),
        ]
        parent = os.getpid()
        self._server = subprocess.Popen(
            command,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ray kills its workers with SIGKILL, after which no code of ours runs
            preexec_fn=lambda: die_with_parent_only(parent),
            encoding="utf-8",
            errors="replace",
        )
        assert self._server.stdout is not None
        words: list[str] = []
        for line in self._server.stdout:
            if line.startswith(_SERVING):
                public_key = read_public_key(keys / "server.pub")
                return [line.removeprefix(_SERVING).strip(), public_key]
            words.append(line.rstrip())
        raise RuntimeError(f"our host server ended: {' '.join(words[-5:])}")

    def gpus(self) -> list[str]:
        """Return the name and the bytes of each GPU of this node, in turn."""
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            found = subprocess.run(
                query,
                capture_output=True,
                text=True,
                check=True,
                encoding="utf-8",
                errors="replace",
            ).stdout
            rows = [line.rpartition(",") for line in found.splitlines() if "," in line]
            return [word for name, _, mib in rows for word in (name.strip(), str(int(mib) * 2**20))]
        return []

    def stop(self) -> None:
        """End the server, and all that it started."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._folder.remove()


def _environment() -> dict[str, str]:
    """Return this worker's environment without what Ray set for its own workers."""
    # Ray hides GPUs from an actor that reserves none, and takes all threads but one
    hidden = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RAY_AUTH_TOKEN"}
    return {name: value for name, value in os.environ.items() if name not in hidden}
