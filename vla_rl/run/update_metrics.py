"""The metrics of each update of a run, from all of its parts.

learner's report ─┐
metrics of nodes ─┼► metrics of the update       the later of two equal names counts
parts, device ────┘
"""

from vla_rl.graph import Update
from vla_rl.learner import UpdateReport
from vla_rl.pipelines.config import LearningConfig
from vla_rl.run.estimates import device_name, peak_of_run
from vla_rl.run.parts import TrainingParts
from vla_rl.run.utilization import Utilization


class UpdateMetrics:
    """Measures the updates of one run, and from now on the arithmetic of its device.

    Args:
        config: settings of the run.
        parts: parts of the run, whose learner has not started.
        num_restarts: how often the run was restarted before.
    """

    def __init__(self, config: LearningConfig, parts: TrainingParts, num_restarts: int) -> None:
        self._config, self._parts, self._num_restarts = config, parts, num_restarts
        self._utilization: Utilization | None = None
        peak = peak_of_run(config.run, device_name(parts.device))
        # ranks compute in processes of their own, whose arithmetic this lane does not see
        if peak is not None and config.learner.ranks == 1:
            self._utilization = Utilization(parts.lane, peak.flops)
        elif peak is not None:
            parts.learner.count_flops(peak.flops)

    def report_of(self, update: Update) -> UpdateReport | None:
        """Return the learner's report of an update; None if the update was cut short before."""
        report = self._parts.learn.last_report
        return report if report and report.weight_version == update.index + 1 else None

    async def measure(self, update: Update) -> dict[str, float]:
        """Return the metrics of an update that has just ended. Call it once for each."""
        parts, report = self._parts, self.report_of(update)
        lag = await parts.runtime.loop_lag()
        return {
            # an update that was cut short lacks them
            **(report.metrics if report is not None else {}),
            **update.metrics,
            **parts.metrics(),
            **self._restarts(),
            **{f"time/node/{node}_s": span.busy_s for node, span in update.spans.items()},
            **(self._utilization.metrics() if self._utilization is not None else {}),
            "time/update_s": update.duration_s,
            "time/device_busy_share": parts.lane.busy_share(),
            "time/loop_lag_p99_s": lag.p99_s,
            "time/loop_lag_max_s": lag.max_s,
        }

    def _restarts(self) -> dict[str, float]:
        has_ranks = self._config.learner.ranks > 1 or self._num_restarts > 0
        return {"learner/restarts": float(self._num_restarts)} if has_ranks else {}
