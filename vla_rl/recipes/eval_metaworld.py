"""Evaluate a checkpoint on Meta-World:
`python -m vla_rl.recipes.eval_metaworld CHECKPOINT --suites metaworld_mt10`.

Runs every task of the suites from its first 50 starts exactly once and writes the table, the files
and the videos of `eval_libero`, with the same options to resume and to record.

    ... CHECKPOINT --tasks drawer-open,reach             some tasks, by name or number
    ... CHECKPOINT --init-states 40-49,1000-1023         held-out starts only
    ... CHECKPOINT --image-size 256 --quality exact      the pixels of Meta-World's own renderer
"""

import sys
from functools import partial
from typing import Annotated, ClassVar

import msgspec
import tyro

from vla_rl.cli.evaluate import EvalLaunch, main
from vla_rl.cli.launch import run_recipe
from vla_rl.evaluation.config import EvalConfig
from vla_rl.evaluation.scenes import ImageSize, MetaworldQuality, MetaworldScene, StepLimit
from vla_rl.evaluation.suites import METAWORLD, Benchmark


class EvalMetaworldConfig(EvalConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on Meta-World."""

    benchmark: ClassVar[Benchmark] = METAWORLD

    checkpoint: tyro.conf.Positional[str] = "base"
    """Folder or hub id of a checkpoint, or the address of a policy server, ws://HOST:PORT. Default: the
    folder that `sft_metaworld` writes."""

    suites: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("metaworld_mt10",)
    """Suites of Meta-World: metaworld_mt10, metaworld_mt50."""

    tasks: str = "all"
    """Tasks of each suite: all, or names, numbers and ranges, such as drawer-open,0-3."""

    init_states: str = "all"
    """Starts of each task: all (the first 50), or numbers and ranges, such as 40-49,1000-1023."""

    step_limit: StepLimit | None = None
    """None: Meta-World's 500."""

    image_size: ImageSize = 84
    """Choose that of the policy's demonstrations."""

    quality: MetaworldQuality = "fast"

    @property
    def scene(self) -> MetaworldScene:
        """Conditions of the environments."""
        return MetaworldScene(
            image_size=self.image_size, step_limit=self.step_limit, quality=self.quality
        )


cli = partial(run_recipe, EvalLaunch, EvalMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
