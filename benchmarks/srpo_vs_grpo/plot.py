"""Draw the study: success by update, and the paired differences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.srpo_vs_grpo.comparison import differences, mean_interval, paired_seeds
from benchmarks.srpo_vs_grpo.lines import ArmRun

COLOURS: Final = {"grpo": "#2b5fb5", "srpo": "#2a7f4f", "srpo_released": "#b5532b"}
SIZE_INCH: Final = (10.0, 3.6)
BASELINE: Final = "grpo"


def draw_study(runs: Sequence[ArmRun], arms: Sequence[str], file: Path) -> None:
    """Write an image with two parts.

    Left: success of the sampled episodes by update, mean over the seeds with its 95 % interval.
    Right: held-out success after training minus that of `grpo` with the same seed, a dot for each
    seed and a bar for the mean.
    """
    figure = Figure(figsize=SIZE_INCH, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_success(left, runs, arms)
    _draw_differences(right, runs, [arm for arm in arms if arm != BASELINE])
    figure.savefig(file, dpi=100)


def _draw_success(axes: Axes, runs: Sequence[ArmRun], arms: Sequence[str]) -> None:
    seeds = paired_seeds(runs, arms)
    for arm in arms:
        by_update = np.array(
            [run.success for run in runs if run.arm == arm and run.seed in seeds]
        ).T
        low, middle, high = 100 * np.array([mean_interval(values) for values in by_update]).T
        updates = np.arange(1, len(by_update) + 1)
        axes.plot(updates, middle, color=COLOURS[arm], label=arm)
        axes.fill_between(updates, low, high, color=COLOURS[arm], alpha=0.12, linewidth=0)
    axes.set(xlabel="update", ylabel="success of sampled episodes, %", ylim=(0, 100))
    axes.legend(loc="lower right")


def _draw_differences(axes: Axes, runs: Sequence[ArmRun], arms: Sequence[str]) -> None:
    for index, arm in enumerate(arms):
        points = differences(runs, arm, BASELINE)
        # spread, or equal differences would lie on each other
        across = index + np.linspace(-0.2, 0.2, len(points))
        axes.plot(across, points, "o", color=COLOURS[arm], alpha=0.7)
        axes.hlines(np.mean(points), index - 0.3, index + 0.3, color=COLOURS[arm])
    axes.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(arms)), [f"{arm} - {BASELINE}" for arm in arms])
    axes.set(xlim=(-0.5, len(arms) - 0.5), ylabel="held-out success, points")
