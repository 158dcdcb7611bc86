"""Evaluation: run given episodes, each once, and store the results.

`eval_libero`, `watch_libero` and training runs with held-out episodes share it.

checkpoint ─► evaluator process (beside training) ─► held_out.jsonl ─► curve, best
planned episodes ─► play_each (pool, engine, agent) ─► ResultFile, videos, recordings ─► tables, results.json
"""

from vla_rl.evaluation.held_out import HeldOutJudge, HeldOutResult, held_out_table, read_held_out
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.libero import check_starts, libero_episode, parse_numbers, parse_tasks
from vla_rl.evaluation.playing import embodied_agent_within_range, play_each, within_range
from vla_rl.evaluation.results import (
    EpisodeResult,
    ResultFile,
    result_of,
    result_table,
    wilson_interval,
)
from vla_rl.evaluation.scenes import LiberoScene, MetaworldScene, libero_env
from vla_rl.evaluation.strips import write_strip

__all__ = [
    "EpisodeResult",
    "HeldOutJudge",
    "HeldOutResult",
    "HeldOutSchedule",
    "LiberoScene",
    "MetaworldScene",
    "ResultFile",
    "check_starts",
    "embodied_agent_within_range",
    "held_out_table",
    "libero_env",
    "libero_episode",
    "parse_numbers",
    "parse_tasks",
    "play_each",
    "read_held_out",
    "result_of",
    "result_table",
    "wilson_interval",
    "within_range",
    "write_strip",
]
