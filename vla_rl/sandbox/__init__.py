"""Killable child processes for single calls. No torch.

They contain the effects of tools, scorers and model-written code.

    Sandbox          `await call("module:function", {...}, limits)`, `await run_program(source, stdin, limits)`
    ProcessLimits    time, CPU, memory, files, output, processes, network
    CallResult       the returned value and the output, or the limit that was exceeded

One call runner forks for every call, isolates it as far as the kernel allows, watches it, and
kills it with all processes that it started.

The names below are imported on first use, because the call runner's process imports this package too
and has no use for the owner's side of it.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.sandbox.protocol import Fault as Fault, ProcessLimits as ProcessLimits
    from vla_rl.sandbox.sandbox import (
        CallResult as CallResult,
        Sandbox as Sandbox,
        SandboxConfig as SandboxConfig,
        function_path as function_path,
    )


__getattr__, __dir__ = lazy_names(__name__)
