"""Text environments: one protocol for single-turn, multi-turn, tool-using and several-agent tasks.

    TextTask            written by the task's author: setup, reply, tools
    TextEpisode         runs one: executes tools, answers malformed calls, enforces limits and deadlines
    TextEnvPool         leases them to episodes, like a pool of simulators
    Toolbox             typed tools: `list_tools()`, `await aexecute(name, arguments)`
    Sandbox             processes for code that may hang, crash or be hostile
    register_text_task  registers a short name for a task; `module:Class` works without one

A task is imported when its first episode starts.
"""

from vla_rl.envs.text.episode import TextEnvPool, TextEpisode, TextPoolConfig
from vla_rl.envs.text.task import (
    Ask,
    Done,
    TextLimits,
    TextTask,
    is_text_task,
    make_text_task,
    register_text_task,
    text_task_ids,
)
from vla_rl.envs.text.tools import ToolAnswer, Toolbox
from vla_rl.sandbox import CallResult, ProcessLimits, Sandbox, SandboxConfig

_TASKS = "vla_rl.envs.text"
register_text_task("text/arithmetic", f"{_TASKS}.arithmetic:ArithmeticTask")
register_text_task("text/arithmetic_pair", f"{_TASKS}.arithmetic:ArithmeticPairTask")
register_text_task("text/question", f"{_TASKS}.questions:QuestionTask")
register_text_task("text/square", f"{_TASKS}.questions:SquareTask")
register_text_task("text/search", f"{_TASKS}.questions:SearchTask")

__all__ = [
    "Ask",
    "CallResult",
    "Done",
    "ProcessLimits",
    "Sandbox",
    "SandboxConfig",
    "TextEnvPool",
    "TextEpisode",
    "TextLimits",
    "TextPoolConfig",
    "TextTask",
    "ToolAnswer",
    "Toolbox",
    "is_text_task",
    "make_text_task",
    "register_text_task",
    "text_task_ids",
]
