"""Evaluation: run given episodes, each once, and store a record of each.

`eval_libero`, `watch_libero` and training runs with held-out episodes share it.

checkpoint ─► evaluator process (during training) ─► held_out.jsonl ─► curve, best
planned episodes ─► run_each (pool, engine, agent) ─► RecordFile, videos, recordings ─► tables, results.json
"""

from vla_rl.evaluation.contact_sheets import write_contact_sheet
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.record_file import RecordFile, read_records
from vla_rl.evaluation.records import EpisodeRecord, make_record
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each, within_range
from vla_rl.evaluation.scenes import LiberoScene, MetaworldScene
from vla_rl.evaluation.suites import check_starts, libero_episode, parse_numbers, parse_tasks
from vla_rl.evaluation.tables import result_table, weights_table, wilson_interval

__all__ = [
    "EpisodeRecord",
    "HeldOutEvaluator",
    "HeldOutSchedule",
    "LiberoScene",
    "MetaworldScene",
    "RecordFile",
    "check_starts",
    "embodied_agent_within_range",
    "libero_episode",
    "make_record",
    "parse_numbers",
    "parse_tasks",
    "read_records",
    "result_table",
    "run_each",
    "weights_table",
    "wilson_interval",
    "within_range",
    "write_contact_sheet",
]
