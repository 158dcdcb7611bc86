"""Evaluation: run given episodes, each once, and store the results.

`eval_libero`, `watch_libero` and training runs with held-out episodes share it.

checkpoint ─► evaluator process (beside training) ─► held_out.jsonl ─► curve, best
planned episodes ─► run_each (pool, engine, agent) ─► ResultFile, videos, recordings ─► tables, results.json
"""

from vla_rl.evaluation.contact_sheets import write_contact_sheet
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.held_out_records import HeldOutResult, held_out_table, read_held_out
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.results import EpisodeResult, ResultFile, episode_result, wilson_interval
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each, within_range
from vla_rl.evaluation.scenes import LiberoScene, MetaworldScene
from vla_rl.evaluation.suites import check_starts, libero_episode, parse_numbers, parse_tasks
from vla_rl.evaluation.tables import result_table

__all__ = [
    "EpisodeResult",
    "HeldOutEvaluator",
    "HeldOutResult",
    "HeldOutSchedule",
    "LiberoScene",
    "MetaworldScene",
    "ResultFile",
    "check_starts",
    "embodied_agent_within_range",
    "episode_result",
    "held_out_table",
    "libero_episode",
    "parse_numbers",
    "parse_tasks",
    "read_held_out",
    "result_table",
    "run_each",
    "wilson_interval",
    "within_range",
    "write_contact_sheet",
]
