"""Prepares the processes that vLLM starts, before anything else runs in them.

It also lets vLLM import beside a CPU torch.

Engine processes have this folder on their PYTHONPATH, so Python imports this file when it starts.
Processes that vLLM does not start, and multiprocessing's own helpers, are not changed.

- An engine process dies with its parent, even while it loads torch for seconds or is stopped.
- Ctrl-C and a closed terminal are sent to the whole process group; the parent decides what happens
  to the engine.
- Its temporary files are in the engine's folder, which is removed even after a kill.
- vLLM imports torchvision, which fails beside a CPU build of torch unless `vla_rl` was imported
  first (see `vla_rl.util.import_hooks`).
"""

import ctypes
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

PARENT = "VLA_RL_ENGINE_PARENT"
"""Environment variable with the id of the process that starts engines."""

PACKAGES = str(Path(__file__).resolve().parents[4])
"""Folder that holds `vla_rl`, also in a checkout that is not installed."""

_PR_SET_PDEATHSIG = 1


def become_engine_process() -> None:
    """Tie this process to its parent, if vLLM started it for one of our engines."""
    parent = os.environ.get(PARENT)
    if parent is None or not _was_started_by_vllm(sys.orig_argv):
        return
    # vLLM's engine does not notice the end of its client: after a kill -9 it ran on for ever, with
    # the GPU's memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before this process asked the kernel
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    os.environ[PARENT] = str(os.getpid())
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"]


def _was_started_by_vllm(arguments: list[str]) -> bool:
    """Return whether a process is an engine started by multiprocessing, or a vllm module that
    describes a network.
    """
    modules = (module for flag, module in pairwise(arguments) if flag == "-m")
    return "--multiprocessing-fork" in arguments or any(
        name.split(".")[0] == "vllm" for name in modules
    )


# False in the process that starts engines, which imports this file by its full name
if __name__ == "sitecustomize":
    become_engine_process()
    sys.path.append(PACKAGES)
    import vla_rl  # noqa: F401  # brings neither torch nor torchvision
