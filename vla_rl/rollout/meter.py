"""The metrics of a scheduler: rates since the last report, and totals since the run started."""

from collections import Counter
from collections.abc import Callable, Mapping

from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import Group, Trajectory


class RolloutMeter:
    """Counts what happens to episodes and groups; `report` turns it into metrics.

    Args:
        decisions: returns the counts of the policy's decisions up to a time of the loop's clock.
    """

    def __init__(self, decisions: Callable[[float], DecisionCounts]) -> None:
        self._decisions = decisions
        self.staleness: Counter[int] = Counter()
        """Trained groups by staleness, in updates, since the run started."""

        self.replays: Counter[str] = Counter()
        """Attempts lost to dead, frozen or too slow processes, by kind, since the run started."""

        self.stopped: Counter[str] = Counter()
        """Episodes that the agent ended instead of the environment, by reason, since the run
        started."""

        self._counts: Counter[str] = Counter()
        self._window: Counter[str] = Counter()
        self._played: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()
        """Episodes by task since the last report: all of them, and the solved ones."""

        self._returns: dict[str, float] = {}
        """Sums of undiscounted returns by task, since the last report."""

        self._tasks: set[str] = set()
        self._judged: set[str] = set()
        """Tasks whose success is known: the info of an episode has had the key `is_success`."""

        self._window_staleness: Counter[int] = Counter()
        self._since = self._asked_s = 0.0

    def start(self, now: float) -> None:
        """Count rates from now on."""
        self._since, self._asked_s = now, self._decisions(now).asked_s

    def episode(self, trajectory: Trajectory) -> None:
        """Count an episode that ran to its end."""
        self._counts["episodes"] += 1
        self._counts["env_steps"] += trajectory.num_env_steps
        if not trajectory.stop_reason.is_of_environment:
            self.stopped[trajectory.stop_reason.value] += 1
        task = trajectory.episode.task
        self._tasks.add(task)
        self._played[task] += 1
        self._solved[task] += trajectory.is_success
        self._returns[task] = self._returns.get(task, 0.0) + trajectory.undiscounted_return
        if trajectory.is_success_known:
            self._judged.add(task)

    def group(self, *, kept: bool) -> None:
        """Count a complete group, kept or filtered."""
        self._counts["groups_kept" if kept else "groups_filtered"] += 1

    def lost(self, kind: str) -> None:
        """Count an attempt at an episode that was lost."""
        self.replays[kind] += 1

    def trained(self, group: Group, version: int) -> None:
        """Count a group that the update starting from `version` was trained on."""
        self.staleness[version - group.dispatch_version] += 1
        self._window_staleness[version - group.dispatch_version] += 1

    def report(
        self, now: float, depths: Mapping[str, int], dropped: Mapping[str, int]
    ) -> dict[str, float]:
        """Return the metrics since the last report.

        `depths` are queue lengths now, `dropped` the ledger's drops by cause.

        If there are several tasks, `rollout/success_rate/<task>` and `rollout/mean_return/<task>`
        are those of each task with an episode since then. Success rates leave out the tasks whose
        infos never had the key `is_success`.
        """
        seconds = max(now - self._since, 1e-9)
        decisions = self._decisions(now)
        self._counts["decisions"], asked_s = decisions.num_decisions, decisions.asked_s
        new = self._counts - self._window
        groups = new["groups_kept"] + new["groups_filtered"]
        metrics = {
            f"{name}_per_s": new[name] / seconds for name in ("episodes", "env_steps", "decisions")
        }
        metrics["policy_busy_share"] = (asked_s - self._asked_s) / seconds
        metrics["filtered_share"] = new["groups_filtered"] / groups if groups else 0.0
        metrics |= self._outcomes()
        num_trained = self._window_staleness.total()
        if num_trained:
            metrics["staleness/mean"] = (
                sum(k * n for k, n in self._window_staleness.items()) / num_trained
            )
            metrics["staleness/max"] = max(self._window_staleness)
            metrics |= {
                f"staleness/share_{k}": n / num_trained
                for k, n in sorted(self._window_staleness.items())
            }
        metrics |= {f"depth/{name}": depth for name, depth in depths.items()}
        metrics |= {f"lost/{kind}": count for kind, count in sorted(self.replays.items())}
        metrics |= {f"stopped/{reason}": n for reason, n in sorted(self.stopped.items())}
        metrics |= {f"dropped/{cause}": count for cause, count in sorted(dropped.items())}
        self._window, self._since, self._asked_s = self._counts.copy(), now, asked_s
        self._window_staleness.clear()
        self._played.clear()
        self._solved.clear()
        self._returns.clear()
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}

    def _outcomes(self) -> dict[str, float]:
        """Return success rates and mean returns since the last report."""
        judged = {
            task: number for task, number in sorted(self._played.items()) if task in self._judged
        }
        metrics = {}
        if judged:
            metrics["success_rate"] = sum(self._solved[task] for task in judged) / sum(
                judged.values()
            )
        if self._played:
            metrics["mean_return"] = sum(self._returns.values()) / self._played.total()
        if len(self._tasks) > 1:
            metrics |= {
                f"success_rate/{task}": self._solved[task] / number
                for task, number in judged.items()
            }
            metrics |= {
                f"mean_return/{task}": self._returns[task] / n
                for task, n in sorted(self._played.items())
            }
        return metrics
