"""Killable child processes for single calls. No torch.

They contain the effects of tools, scorers and model-written code.

    Sandbox          `await call("module:function", {...}, limits)`, `await run_program(source, stdin, limits)`
    ProcessLimits    time, CPU, memory, files, output, processes, network
    CallResult       the returned value and the output, or the limit that was exceeded

One keeper process forks for every call, isolates it as far as the kernel allows, watches it, and
kills it with all processes that it started.
"""

from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import Fault
from vla_rl.sandbox.sandbox import CallResult, Sandbox, SandboxConfig, function_path

__all__ = ["CallResult", "Fault", "ProcessLimits", "Sandbox", "SandboxConfig", "function_path"]
