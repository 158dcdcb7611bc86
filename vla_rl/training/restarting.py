"""Restart a run after a rank of its sharded learner died, froze or failed.

    rank fails ─► all ranks end ─► the run is closed in order ─► newest checkpoint ─► the run goes on

A restart is a resume in the same process: weights, optimizer, scheduler and data cursor return to
the same update, so that no episode is lost or trained on twice.
"""

from vla_rl.errors import RankFailed
from vla_rl.pipelines.config import LearningConfig
from vla_rl.training.team import Team


class Restarts:
    """Counts the restarts of a run, and ends it after too many without a new checkpoint.

    Args:
        max_in_a_row: number of restarts from the same checkpoint.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row, self._version = 0, -1
        self.num_restarts = 0
        """Number of restarts so far."""

    @classmethod
    def of(cls, config: LearningConfig, team: Team) -> "Restarts":
        """Return the counter of a run, none made yet."""
        learners = [member.learner or config.learner for member in team.members.values()]
        return cls(max(learner.max_restarts for learner in learners))

    def count(self, error: Exception, version: int) -> None:
        """Count a restart from the checkpoint of update `version`, and print a line about it.

        Raises: `error` if no rank failed; RankFailed if that is one restart too many.
        """
        failure = rank_failure_in(error)
        if failure is None:
            raise error
        self._num_in_a_row = self._num_in_a_row + 1 if version == self._version else 1
        self._version = version
        if self._num_in_a_row > self._max_in_a_row:
            raise RankFailed(
                f"{failure}. The run was restarted {self._max_in_a_row} times (LearnerConfig."
                f"max_restarts) without a checkpoint newer than update {version}, and ends here; "
                "look at the cause, then continue with --resume, with any number of "
                "--learner.ranks"
            ) from error
        self.num_restarts += 1
        print(
            f"{failure}. Restart {self._num_in_a_row} of at most {self._max_in_a_row}: the run "
            f"continues after update {version}",
            flush=True,
        )


def rank_failure_in(error: BaseException) -> RankFailed | None:
    """Return the failure of a rank that ended a run, also inside of groups and as a cause."""
    if isinstance(error, RankFailed):
        return error
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (*inside, error.__cause__):
        if each is not None and (found := rank_failure_in(each)) is not None:
            return found
    return None
