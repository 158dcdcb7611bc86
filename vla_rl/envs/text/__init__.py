"""Text environments: one protocol for single-turn, multi-turn, tool-using and several-agent tasks.

    TextTask            written by the task's author: setup, reply, tools
    TextEpisode         runs one: executes tools, answers malformed calls, enforces limits and deadlines
    TextEnvPool         leases them to episodes, like a pool of simulators
    Toolbox             typed tools: `list_tools()`, `await aexecute(name, arguments)`
    Sandbox             processes for code that may hang, crash or be hostile
    register_text_task  registers a short name for a task; `module:Class` works without one

A task is imported when its first episode starts.
"""

from vla_rl.envs.text.episode import TextEnvPool as TextEnvPool, TextPoolConfig as TextPoolConfig
from vla_rl.envs.text.task import (
    Ask as Ask,
    Done as Done,
    TextLimits as TextLimits,
    TextTask as TextTask,
    is_text_task as is_text_task,
    make_text_task as make_text_task,
    register_text_task as register_text_task,
    text_task_ids as text_task_ids,
)
from vla_rl.envs.text.tools import Toolbox as Toolbox
from vla_rl.sandbox import Sandbox as Sandbox

_TASKS = "vla_rl.envs.text"
register_text_task("text/arithmetic", f"{_TASKS}.arithmetic:ArithmeticTask")
register_text_task("text/arithmetic_pair", f"{_TASKS}.arithmetic:ArithmeticPairTask")
register_text_task("text/openenv", f"{_TASKS}.openenv:OpenEnvTask")
register_text_task("text/question", f"{_TASKS}.questions:QuestionTask")
register_text_task("text/square", f"{_TASKS}.scenes:SceneTask")
register_text_task("text/sum", f"{_TASKS}.sums:SumTask")
register_text_task("text/search", f"{_TASKS}.questions:SearchTask")
