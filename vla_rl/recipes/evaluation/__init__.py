"""Playing given episodes, each once, and what came of them: shared by `eval_libero` and `watch_libero`.

planned episodes ─► play_each (pool, engine, agent) ─► ResultFile, videos, recordings ─► tables, results.json
"""

from vla_rl.recipes.evaluation.libero import check_starts, libero_env, libero_episode, numbers_in
from vla_rl.recipes.evaluation.playing import WithinRange, play_each
from vla_rl.recipes.evaluation.results import EpisodeResult, ResultFile, result_of, result_table, wilson_interval

__all__ = [
    "EpisodeResult",
    "ResultFile",
    "WithinRange",
    "check_starts",
    "libero_env",
    "libero_episode",
    "numbers_in",
    "play_each",
    "result_of",
    "result_table",
    "wilson_interval",
]
