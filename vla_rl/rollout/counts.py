"""Counts of what becomes of episodes: conservation, losses, filters, metrics.

    dispatched = trained + filtered + dropped (by cause) + in flight + buffered

The ledger counts the flows. Episodes in flight and buffered are counted where they are held, at the
moment of the check, so that an episode that is lost or held twice is detected. `Attempts` and `GroupFilter`
fail a run that would otherwise repeat an episode, or filter its groups, for ever.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from vla_rl.errors import ConservationError
from vla_rl.rollout.episode_runner import EpisodeLost
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import Group, Trajectory


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """All flows since the run began, in episodes.

    Example:
        500 episodes since the start, 8 of which a resume with a smaller max_staleness has dropped; those
        that are in none of these are in flight or buffered:

        LedgerState(dispatched=500, trained=400, filtered=60, dropped={"stale": 8})
    """

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: dict[str, int] = {}

    def since(self, earlier: "LedgerState") -> "LedgerState":
        """Return the flows after an earlier state of the same run."""
        return LedgerState(
            dispatched=self.dispatched - earlier.dispatched,
            trained=self.trained - earlier.trained,
            filtered=self.filtered - earlier.filtered,
            dropped={
                cause: number - earlier.dropped.get(cause, 0)
                for cause, number in self.dropped.items()
            },
        )


class EpisodeLedger:
    """Counts every episode once when it is dispatched and once when it leaves."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state if state is not None else LedgerState()
        self.num_dispatched, self.num_trained, self.num_filtered = (
            state.dispatched,
            state.trained,
            state.filtered,
        )
        self.dropped: dict[str, int] = dict(state.dropped)

    def count_dispatched(self, num_episodes: int) -> None:
        """Count the episodes of a group that was admitted.

        Another attempt at a lost episode is the same episode.
        """
        self.num_dispatched += num_episodes

    def count_trained(self, num_episodes: int) -> None:
        """Count episodes that an update was trained on."""
        self.num_trained += num_episodes

    def count_filtered(self, num_episodes: int) -> None:
        """Count the episodes of a group that was run and not kept."""
        self.num_filtered += num_episodes

    def count_dropped(self, num_episodes: int, cause: str) -> None:
        """Count episodes that were dropped, by cause, such as `"stale"`."""
        self.dropped[cause] = self.dropped.get(cause, 0) + num_episodes

    def check_conservation(self, *, in_flight: int, buffered: int) -> None:
        """Raise ConservationError unless every dispatched episode is in exactly one place.

        The error has the table.
        """
        accounted = (
            self.num_trained + self.num_filtered + sum(self.dropped.values()) + in_flight + buffered
        )
        if accounted != self.num_dispatched:
            raise ConservationError(
                f"{self.num_dispatched} episodes were dispatched, {accounted} are accounted for:\n"
                + self.table(in_flight=in_flight, buffered=buffered)
            )

    def table(self, *, in_flight: int, buffered: int) -> str:
        """Return the counts of the dispatched episodes by where they are, one line each."""
        rows = {
            "dispatched": self.num_dispatched,
            "trained": self.num_trained,
            "filtered": self.num_filtered,
            **{f"dropped ({cause})": count for cause, count in sorted(self.dropped.items())},
            "in flight": in_flight,
            "buffered": buffered,
        }
        return "\n".join(f"    {name:<24}{count:>10}" for name, count in rows.items())

    def state(self) -> LedgerState:
        """Return all flows so far."""
        return LedgerState(
            dispatched=self.num_dispatched,
            trained=self.num_trained,
            filtered=self.num_filtered,
            dropped=dict(self.dropped),
        )


MAX_HOST_LOSSES: Final = 10
"""Times an episode may be lost with its host. A host that goes takes along all its episodes, and is no
fault of theirs: machines that are lent by the hour go often. But one episode may be what ends them."""


class Attempts:
    """Counts the losses of the episodes that run.

    Args:
        max_attempts: times an episode is started, at most, on hosts that stay.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._lost: Counter[tuple[int, bool]] = Counter()

    def allow(self, loss: EpisodeLost) -> bool:
        """Count a loss; return whether the episode is to be run again. If not, the loss says why."""
        # Apart for hosts: rented machines go in the middle of many episodes, and an episode must
        # not fail for three of them.
        key = loss.episode.episode_id, loss.with_host
        self._lost[key] += 1
        if loss.with_host and self._lost[key] >= MAX_HOST_LOSSES:
            loss.add_note(
                f"{MAX_HOST_LOSSES} hosts were lost while they ran it, so it may be what ends them"
            )
            return False
        if not loss.with_host and self._lost[key] >= self._max_attempts:
            loss.add_note(f"that was the last of max_attempts={self._max_attempts}")
            return False
        return True

    def forget_episode(self, episode_id: int) -> None:
        """Forget an episode that ran to its end."""
        for with_host in (False, True):
            del self._lost[episode_id, with_host]


logger = logging.getLogger(__name__)

WARN_EVERY: Final = 10
"""Groups filtered in a row between two warnings."""


class GroupFilter:
    """Asks `keep` about each complete group, and fails instead of filtering for ever.

    Args:
        keep: returns whether to keep a group; None keeps all.
        max_in_a_row: groups filtered in a row, with none kept, after which it fails; None: never.
    """

    def __init__(self, keep: Callable[[Group], bool] | None, max_in_a_row: int | None) -> None:
        self._keep, self._max_in_a_row = keep, max_in_a_row
        self._num_in_a_row = 0

    def is_kept(self, group: Group) -> bool:
        """Return whether to keep a group. Raises: what `keep` raises."""
        is_kept = self._keep is None or self._keep(group)
        self._num_in_a_row = 0 if is_kept else self._num_in_a_row + 1
        return is_kept

    def require_some_kept(self, update: int) -> None:
        """Warn or raise RuntimeError if no group was kept for long.

        Args:
            update: the update that waits for a group.
        """
        number = self._num_in_a_row
        if number and number % WARN_EVERY == 0:
            logger.warning(
                "%d groups in a row were filtered and none was kept: update %d is waiting for one",
                number,
                update,
            )
        # without a limit, a filter that no group passes would keep every environment busy for ever
        if self._max_in_a_row is not None and number >= self._max_in_a_row:
            raise RuntimeError(
                f"{number} groups in a row were filtered and none was kept, so update "
                f"{update} would never be filled; loosen the filter, choose tasks that are "
                "sometimes solved, or raise max_filtered_in_a_row"
            )


class RolloutMetrics:
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
        self._finished: Counter[str] = Counter()
        self._solved: Counter[str] = Counter()
        """Episodes by task since the last report: all of them, and the solved ones."""

        self._returns: dict[str, float] = {}
        """Sums of undiscounted returns by task, since the last report."""

        self._tasks: set[str] = set()
        self._with_known_success: set[str] = set()
        """Tasks whose success is known: the info of an episode has had the key `is_success`."""

        self._window_staleness: Counter[int] = Counter()
        self._since = self._asked_s = 0.0

    def start_window(self, now: float) -> None:
        """Count rates from now on."""
        self._since, self._asked_s = now, self._decisions(now).asked_s

    def count_episode(self, trajectory: Trajectory) -> None:
        """Count an episode that ran to its end."""
        self._counts["episodes"] += 1
        self._counts["env_steps"] += trajectory.num_env_steps
        # control steps that a simulator ran to say what its expert would do, and took back
        planned = trajectory.info.get("planned_steps", 0)
        # an environment of somebody else may have a key of this name
        self._counts["planned_steps"] += planned if isinstance(planned, int) else 0
        if not trajectory.stop_reason.is_of_environment:
            self.stopped[trajectory.stop_reason.value] += 1
        task = trajectory.episode.task
        self._tasks.add(task)
        self._finished[task] += 1
        self._solved[task] += trajectory.is_success
        self._returns[task] = self._returns.get(task, 0.0) + trajectory.undiscounted_return
        if trajectory.is_success_known:
            self._with_known_success.add(task)

    def count_group(self, *, kept: bool) -> None:
        """Count a complete group, kept or filtered."""
        self._counts["groups_kept" if kept else "groups_filtered"] += 1

    def count_lost(self, kind: str) -> None:
        """Count an attempt at an episode that was lost."""
        self.replays[kind] += 1

    def count_trained(self, group: Group, version: int) -> None:
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
        # In simulated time two reports may be at the same instant.
        seconds = max(now - self._since, 1e-9)
        decisions = self._decisions(now)
        self._counts["decisions"], asked_s = decisions.num_decisions, decisions.asked_s
        new = self._counts - self._window
        groups = new["groups_kept"] + new["groups_filtered"]
        metrics = {
            f"{name}_per_s": new[name] / seconds for name in ("episodes", "env_steps", "decisions")
        }
        metrics["env_steps"] = new["env_steps"]
        if self._counts["planned_steps"]:
            metrics["planned_steps"] = new["planned_steps"]
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
        self._finished.clear()
        self._solved.clear()
        self._returns.clear()
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}

    def _outcomes(self) -> dict[str, float]:
        """Return success rates and mean returns since the last report."""
        known = {
            task: number
            for task, number in sorted(self._finished.items())
            if task in self._with_known_success
        }
        metrics = {}
        if known:
            metrics["success_rate"] = sum(self._solved[task] for task in known) / sum(
                known.values()
            )
        if self._finished:
            metrics["mean_return"] = sum(self._returns.values()) / self._finished.total()
        # Of a single task they would repeat the totals.
        if len(self._tasks) > 1:
            metrics |= {
                f"success_rate/{task}": self._solved[task] / number
                for task, number in known.items()
            }
            metrics |= {
                f"mean_return/{task}": self._returns[task] / n
                for task, n in sorted(self._finished.items())
            }
        return metrics
