"""The report's charts as SVG text: success and return by update, the reward of failures, and time
by node.
"""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vla_rl.evaluation.held_out_curve import Curve, CurvePoint

Rows = Sequence[Mapping[str, float | None]]
"""Metrics by name, one mapping for each update, in order; None is a value that was not finite."""

HeldOutPoint = tuple[int, float, float, float]
"""Weight version, success rate, and the ends of its 95 % interval."""

SUCCESS_RATE = "rollout/success_rate"
MEAN_RETURN = "rollout/mean_return"
"""Metrics over all tasks; followed by `/` and the name of a task, they are of that task."""

SIZE_INCH = (8.0, 2.8)
SUCCESS, RETURN, FAILURE = "#2a7f4f", "#2b5fb5", "#b5532b"


def success_chart(rows: Rows, held_out: Sequence[HeldOutPoint]) -> str | None:
    """Draw the success rate by update: of training episodes, smoothed over nine updates, and of
    held-out episodes with intervals. With several agents or tasks, each has a curve. Returns None
    if success is unknown."""
    if not len(_series(rows, SUCCESS_RATE)[0]) and not held_out:
        return None
    figure, axes = _axes("update", "success rate")
    _plot_training(axes, rows, SUCCESS_RATE, SUCCESS)
    for agent in list_agents(rows):
        curve = _smoothed(rows, f"reward/{agent}/success_rate")
        axes.plot(*curve, linewidth=1.5, linestyle="--", label=f"of {agent}")
    _plot_tasks(axes, rows, SUCCESS_RATE)
    if held_out:
        versions, middle, low, high = np.array(held_out).T
        # rounding can put an end beyond the rate
        errors = np.clip([middle - low, high - middle], 0.0, None)
        axes.errorbar(
            versions,
            middle,
            yerr=errors,
            fmt="o",
            color="black",
            capsize=4,
            label="held out, greedy, 95 %",
        )
    axes.set_ylim(0.0, 1.0)
    return _svg(figure, axes)


def held_out_chart(curve: Curve) -> str | None:
    """Draw the means over the starts that are reported and over those that chose, by weight version,
    with 95 % intervals, and what chose of each task; None if fewer than two versions were evaluated
    on all starts of either.
    """
    if len(curve.chose) < 2 and len(curve.report) < 2:
        return None
    figure, axes = _axes("update", curve.measure.replace("_", " "))
    _plot_points(axes, curve.report, "s", "black", "report, 95 %")
    weights = [point.weights for point in curve.chose]
    for task in curve.chose[-1].tasks if curve.chose else ():
        means = [point.tasks[task].mean if task in point.tasks else np.nan for point in curve.chose]
        axes.plot(weights, means, linewidth=1.2, linestyle=":", marker=".", label=f"chose: {task}")
    _plot_points(axes, curve.chose, "o-", "gray", "chose, 95 %")
    best = curve.best
    if best is not None:
        mean, words = (best.chose, "best, chose") if best.report is None else (best.report, "best")
        axes.plot([best.weights], [mean.mean], "*", color=SUCCESS, markersize=14, label=words)
    if curve.measure == "success_rate":
        axes.set_ylim(0.0, 1.0)
    return _svg(figure, axes)


def _plot_points(
    axes: Axes, points: Sequence[CurvePoint], style: str, color: str, label: str
) -> None:
    if not points:
        return
    middle = np.array([point.all.mean for point in points])
    low, high = np.array([(point.all.low, point.all.high) for point in points]).T
    axes.errorbar(
        [point.weights for point in points],
        middle,
        # rounding can put an end beyond the mean
        yerr=np.clip([middle - low, high - middle], 0.0, None),
        fmt=style,
        color=color,
        capsize=4,
        label=label,
    )


def return_chart(rows: Rows) -> str | None:
    """Draw the mean undiscounted return of the training episodes by update, and of each task if
    there are several.

    Returns None before the first update.
    """
    if not len(_series(rows, MEAN_RETURN)[0]):
        return None
    figure, axes = _axes("update", "mean return")
    _plot_training(axes, rows, MEAN_RETURN, RETURN)
    _plot_tasks(axes, rows, MEAN_RETURN)
    return _svg(figure, axes)


def failure_reward_chart(rows: Rows) -> str | None:
    """Draw the mean reward of failures by update; return None if the run has no such metric."""
    updates, means = _series(rows, "reward/failures_mean")
    if not len(updates):
        return None
    figure, axes = _axes("update", "reward of failures")
    axes.plot(updates, means, color=FAILURE, linewidth=2, label="mean")
    axes.plot(
        *_series(rows, "reward/failures_max"),
        color=FAILURE,
        alpha=0.4,
        linewidth=1,
        label="highest",
    )
    axes.set_ylim(bottom=0.0)
    return _svg(figure, axes)


def value_chart(rows: Rows) -> str | None:
    """Draw an off-policy critic's values of new episodes beside what these earned, by update; return
    None if the run has no such metric.

    Values far above returns are extrapolation: the critic has not seen what the actor does.
    """
    if not len(_series(rows, "critic/new_return_mean")[0]):
        return None
    figure, axes = _axes("update", "mean over new decisions")
    axes.plot(
        *_series(rows, "critic/new_value_mean"),
        color=SUCCESS,
        linewidth=2,
        label="Q before learning",
    )
    axes.plot(
        *_series(rows, "critic/new_return_mean"), color=RETURN, linewidth=2, label="measured return"
    )
    axes.plot(
        *_series(rows, "critic/q_mean"),
        color=SUCCESS,
        alpha=0.4,
        linewidth=1,
        label="Q of sampled rows",
    )
    return _svg(figure, axes)


def time_chart(rows: Rows) -> str | None:
    """Draw the busy seconds of each node by update, stacked.

    Return None before the first update.
    """
    shares = node_seconds(rows)
    if not shares:
        return None
    figure, axes = _axes("update", "busy seconds")
    below = np.zeros(len(rows))
    for node in shares:
        seconds = np.array([row.get(f"time/node/{node}_s") or 0.0 for row in rows])
        axes.bar(
            np.array([row["update"] for row in rows]), seconds, bottom=below, width=1.0, label=node
        )
        below += seconds
    return _svg(figure, axes)


def list_agents(rows: Rows) -> list[str]:
    """List the agents that have a success metric of their own."""
    names = [name.split("/") for row in rows for name in row if name.startswith("reward/")]
    return sorted({name[1] for name in names if len(name) == 3 and name[2] == "success_rate"})


def list_tasks(rows: Rows, metric: str) -> list[str]:
    """List the tasks that have their own value of `metric`; a run of one task has none."""
    return sorted(
        {
            name.removeprefix(f"{metric}/")
            for row in rows
            for name in row
            if name.startswith(f"{metric}/")
        }
    )


def node_seconds(rows: Rows) -> dict[str, float]:
    """Return the busy seconds of each node over all updates, busiest first.

    Nodes overlap, so the sum may exceed the run.
    """
    names = {name for row in rows for name in row if name.startswith("time/node/")}
    totals = {
        name.removeprefix("time/node/").removesuffix("_s"): sum(
            row.get(name) or 0.0 for row in rows
        )
        for name in names
    }
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _plot_training(axes: Axes, rows: Rows, metric: str, color: str) -> None:
    updates, values = _series(rows, metric)
    axes.plot(updates, values, color=color, alpha=0.35, linewidth=1, label="training episodes")
    axes.plot(updates, _smooth(values), color=color, linewidth=2, label="mean of 9 updates")


def _plot_tasks(axes: Axes, rows: Rows, metric: str) -> None:
    for task in list_tasks(rows, metric):
        axes.plot(*_smoothed(rows, f"{metric}/{task}"), linewidth=1.2, linestyle=":", label=task)


def _smoothed(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    updates, values = _series(rows, name)
    return updates, _smooth(values)


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(row["update"], row[name]) for row in rows if row.get(name) is not None]
    return np.array([update for update, _ in found]), np.array([value for _, value in found])


def _smooth(values: np.ndarray, window: int = 9) -> np.ndarray:
    """Return the mean of up to `window` values around each value."""
    half = window // 2
    return np.array(
        [values[max(0, index - half) : index + half + 1].mean() for index in range(len(values))]
    )


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    # without pyplot, which keeps every figure until it is closed and looks for a display
    figure = Figure(figsize=SIZE_INCH, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    text = io.StringIO()
    # without a date, the same metrics give the same page
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    # the header of an XML file is not allowed inside a page
    return svg[svg.index("<svg") :]
