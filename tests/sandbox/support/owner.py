"""`python owner.py <SandboxConfig as JSON>`: a sandbox whose calls try to outlive it. Prints its
processes and its folder as JSON once all of them run, and waits to be killed; on a line from its
standard input the call runner goes to an endless import.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ESCAPING = """
import ctypes, os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # forget whose death should end this one
        os.execvp("sleep", ["sleep", "4321.25"])
os.execvp("sleep", ["sleep", "4321.25"])
"""


def escape() -> None:
    """A function whose helper has a session of its own."""
    subprocess.Popen(["sleep", "4321.25"], start_new_session=True).wait()


def sleepers_among(pids: list[int]) -> int:
    found = 0
    for pid in pids:
        try:
            found += b"4321.25" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # ended as we looked
    return found


async def own(options: dict[str, Any]) -> None:
    from vla_rl.sandbox import ProcessLimits, Sandbox, SandboxConfig
    from vla_rl.sandbox.linux import get_children, get_descendants

    limits = ProcessLimits(timeout_s=2000.0, network=False)
    async with Sandbox(
        SandboxConfig(**options, environment={"IMPORT_BEGUN": os.environ["IMPORT_BEGUN"]})
    ) as sandbox:
        calls = [
            asyncio.create_task(sandbox.run_program(ESCAPING, "", limits)),
            asyncio.create_task(sandbox.call("owner:escape", {}, limits)),
        ]
        while sandbox.runner_pid is None or sleepers_among(get_descendants(sandbox.runner_pid)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (reaper,) = get_children(os.getpid())
        assert sandbox._runner is not None
        print(
            json.dumps(
                {
                    "reaper": reaper,
                    "runner": sandbox.runner_pid,
                    "below": get_descendants(sandbox.runner_pid),
                    "folder": str(sandbox._runner._folder.path),
                }
            ),
            flush=True,
        )
        await asyncio.to_thread(sys.stdin.readline)
        await sandbox.preload("slow_to_import")
        await asyncio.gather(*calls)


if __name__ == "__main__":
    asyncio.run(own(json.loads(sys.argv[1])))
