"""The built-in pipelines, one file each: the graph of one update, with its default settings.

    grpo ──┬── dapo, gspo, cpgd             no critic: episodes of a group are compared with each other
           ├── ppo ─── embodied_ppo         a critic
           └── embodied_grpo ─ embodied_srpo

registry      pipelines by name, the settings that each reads; nodes/: what a node does
config        configurations of runs
parts         what of a run a pipeline uses; team: its policies, pools: its environments
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.pipelines.registry import (
        PIPELINES as PIPELINES,
        make_pipeline as make_pipeline,
        with_pipeline as with_pipeline,
    )

__getattr__, __dir__ = lazy_names(__name__)
