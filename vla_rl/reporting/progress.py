"""The progress of a run: counters and rates for the live view, the summary and the metrics.

The loop writes it and the rendering thread reads it; every access takes one short lock. It does not
depend on a terminal.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vla_rl.types import Trajectory


@dataclass(frozen=True)
class TaskTally:
    """The number of episodes of one task, their successes and their returns.

    Example:
        TaskTally(num_episodes=64, num_successes=40, total_return=40.0, is_success_known=True)
    """

    num_episodes: int = 0
    num_successes: int = 0
    total_return: float = 0.0
    """Sum of the undiscounted returns."""

    is_success_known: bool = False
    """Whether the info of any episode had the key `is_success`. If not, the success counts mean
    nothing."""

    @property
    def success_rate(self) -> float | None:
        """Share of the episodes that solved the task; None if success is not known."""
        return self.num_successes / self.num_episodes if self.is_success_known else None

    @property
    def mean_return(self) -> float | None:
        """Mean undiscounted return; None before the first episode."""
        return self.total_return / self.num_episodes if self.num_episodes else None

    @classmethod
    def of(cls, trajectory: Trajectory) -> "TaskTally":
        """Return the tally of one episode."""
        return cls(
            1,
            int(trajectory.is_success),
            trajectory.undiscounted_return,
            trajectory.is_success_known,
        )

    def __add__(self, other: "TaskTally") -> "TaskTally":
        """Return the sum of both tallies."""
        return TaskTally(
            self.num_episodes + other.num_episodes,
            self.num_successes + other.num_successes,
            self.total_return + other.total_return,
            self.is_success_known or other.is_success_known,
        )


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    num_updates: int
    """Updates of the whole run."""

    update: int
    """Updates applied so far, with those before a resume."""

    elapsed_s: float
    eta_s: float | None
    """Remaining seconds at the speed of the last updates; None before the first."""

    num_episodes: int
    success_rate: float | None
    """Success rate of the most recent episodes of tasks whose success is known; None if there are
    none."""

    mean_return: float | None
    """Mean undiscounted return of the most recent episodes; None before the first."""

    env_steps: int
    env_steps_per_s: float
    """Environment steps a second over the last 30 s."""

    policy_busy_share: float | None
    critical_path: str
    """The line that names the bottleneck of the last update."""

    note: str = ""
    """Words about the last update, such as which learner rank the others waited for."""

    node_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each node took in the last update."""

    total_node_seconds: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, TaskTally] = field(default_factory=dict)


class RunProgress:
    """Counts a run from its first update to its last.

    Args:
        num_updates: updates of the whole run.
        first_update: updates applied before a resume.
        policy_busy_share: returns the share of recent time in which the policy computed, in [0, 1];
            called for each snapshot.
        recent_episodes: number of latest episodes in `success_rate` and `mean_return`.
        rate_window_s: seconds over which `env_steps_per_s` is averaged.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        num_updates: int,
        *,
        first_update: int = 0,
        policy_busy_share: Callable[[], float] | None = None,
        recent_episodes: int = 100,
        rate_window_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_updates, self._update = num_updates, first_update
        self._policy_busy_share, self._rate_window_s, self._clock = (
            policy_busy_share,
            rate_window_s,
            clock,
        )
        self._lock = threading.Lock()
        self._started_s = clock()
        self._recent: deque[tuple[str, bool, float]] = deque(maxlen=recent_episodes)
        """Task, success and return of each of the most recent episodes."""

        self._finished_steps: deque[tuple[float, int]] = deque()
        # ten updates: the speed changes while a policy gets better and its episodes shorter
        self._update_times_s: deque[float] = deque([self._started_s], maxlen=11)
        self._num_episodes = self._env_steps = 0
        self._critical_path = self._note = ""
        self._node_seconds: dict[str, float] = {}
        self._total_node_seconds: dict[str, float] = {}
        self._tasks: dict[str, TaskTally] = {}

    def updates_begin(self) -> None:
        """Count the time of updates from now on; an evaluation may have run before."""
        with self._lock:
            self._update_times_s = deque([self._clock()], maxlen=self._update_times_s.maxlen)

    def episode_done(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""
        task, num_env_steps = trajectory.episode.task, trajectory.num_env_steps
        with self._lock:
            self._tasks[task] = self._tasks.get(task, TaskTally()) + TaskTally.of(trajectory)
            self._num_episodes += 1
            self._env_steps += num_env_steps
            self._recent.append((task, trajectory.is_success, trajectory.undiscounted_return))
            now = self._clock()
            self._finished_steps.append((now, num_env_steps))
            self._forget_steps(now)

    def update_done(
        self, node_seconds: Mapping[str, float], critical_path: str, note: str = ""
    ) -> None:
        """Count an applied update, with each node's seconds, its bottleneck's line and a note."""
        with self._lock:
            self._update += 1
            self._update_times_s.append(self._clock())
            self._node_seconds = dict(node_seconds)
            self._critical_path, self._note = critical_path, note
            for node, seconds in node_seconds.items():
                self._total_node_seconds[node] = self._total_node_seconds.get(node, 0.0) + seconds

    def snapshot(self) -> Snapshot:
        """Return the state of the run now. Safe to call from any thread."""
        # outside of the lock: the lane has a lock of its own, and episodes end meanwhile
        busy = self._policy_busy_share() if self._policy_busy_share is not None else None
        with self._lock:
            now = self._clock()
            self._forget_steps(now)
            # a run of 5 s has no 30 s to average over
            window_s = min(self._rate_window_s, now - self._started_s)
            recent_steps = sum(steps for _, steps in self._finished_steps)
            return Snapshot(
                num_updates=self._num_updates,
                update=self._update,
                elapsed_s=now - self._started_s,
                eta_s=self._eta_s(now),
                num_episodes=self._num_episodes,
                success_rate=_mean(
                    solved for task, solved, _ in self._recent if self._tasks[task].is_success_known
                ),
                mean_return=_mean(earned for _, _, earned in self._recent),
                env_steps=self._env_steps,
                env_steps_per_s=recent_steps / window_s if window_s > 0.0 else 0.0,
                policy_busy_share=busy,
                critical_path=self._critical_path,
                note=self._note,
                node_seconds=dict(self._node_seconds),
                total_node_seconds=dict(self._total_node_seconds),
                tasks=dict(self._tasks),
            )

    def _forget_steps(self, now: float) -> None:
        while self._finished_steps and self._finished_steps[0][0] < now - self._rate_window_s:
            self._finished_steps.popleft()

    def _eta_s(self, now: float) -> float | None:
        times = self._update_times_s
        if len(times) < 2:
            return None
        seconds_per_update = (times[-1] - times[0]) / (len(times) - 1)
        # less what has passed of the running update, so that the display counts down
        remaining_s = (self._num_updates - self._update) * seconds_per_update - (now - times[-1])
        return max(remaining_s, 0.0)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
