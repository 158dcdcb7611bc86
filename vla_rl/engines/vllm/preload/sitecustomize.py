"""Runs before anything else in the processes that vLLM starts, and makes vLLM import beside a CPU build of torch.

Engine processes have this folder on their PYTHONPATH, so Python imports this file at its start. Processes that vLLM does not
start, and multiprocessing's own helpers, are left as they are.

- An engine process dies with its parent, also while it loads torch for seconds or is stopped.
- Ctrl-C and a closed terminal are sent to the whole process group; what becomes of the engine is its parent's decision.
- Its temporary files lie in the engine's folder, which is removed after a kill too.
- vLLM imports torchvision, which fails beside a CPU build of torch unless `vla_rl` was imported first (see
  `vla_rl.torchvision_operators`).
"""

import ctypes
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

PARENT = "VLA_RL_ENGINE_PARENT"
"""Variable with the pid of the process that starts engines."""

PACKAGES = str(Path(__file__).resolve().parents[4])
"""The folder that holds `vla_rl`, also if a checkout is used that is not installed."""

_PR_SET_PDEATHSIG = 1


def become_engine_process() -> None:
    """Tie this process to its parent, if vLLM started it for one of our engines."""
    parent = os.environ.get(PARENT)
    if parent is None or not _was_started_by_vllm(sys.orig_argv):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    os.environ[PARENT] = str(os.getpid())
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"]


def _was_started_by_vllm(arguments: list[str]) -> bool:
    """Return whether a process is an engine, by multiprocessing, or a module of vllm, which describes a network."""
    modules = (module for flag, module in pairwise(arguments) if flag == "-m")
    return "--multiprocessing-fork" in arguments or any(name.split(".")[0] == "vllm" for name in modules)


if __name__ == "sitecustomize":  # not in the process that starts engines, which imports this file by its full name
    become_engine_process()
    sys.path.append(PACKAGES)
    import vla_rl  # noqa: F401  # brings neither torch nor torchvision
