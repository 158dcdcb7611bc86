"""Killable child processes for single calls: what a tool, a scorer or a model's code does stays there. No torch.

    Sandbox          `await call("module:function", {...}, limits)`, `await run_program(source, stdin, limits)`
    ProcessLimits    time, CPU, memory, files, output, processes, network
    CallResult       what was returned and printed, or which limit was passed

One keeper process forks for every call, isolates it as far as the kernel allows, watches it, and kills it with everything
that it started.
"""

from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import Fault
from vla_rl.sandbox.sandbox import CallResult, Sandbox, SandboxConfig, function_path

__all__ = ["CallResult", "Fault", "ProcessLimits", "Sandbox", "SandboxConfig", "function_path"]
