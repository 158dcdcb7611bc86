"""Restart a run after a rank of its sharded learner died, froze or failed.

    rank fails ─► all ranks end ─► the run is closed in order ─► newest checkpoint ─► the run goes on

A restart is a resume in the same process: weights, optimizer, scheduler and data cursor return to
the same update, so that no episode is lost or trained on twice. If a rank cannot be started again,
because its device is gone, the next restart has one rank less, or one tensor group less, and leaves
that device out.
"""

import math
from dataclasses import replace

import msgspec

from vla_rl.errors import ConfigError, RankFailed, RankNotStarted
from vla_rl.learning.config import LearnerConfig
from vla_rl.learning.rank_memory import gpus_of
from vla_rl.pipelines.config import LearningConfig
from vla_rl.training.team import Team, Trainable


class Restarts:
    """Counts the restarts of a run, and ends it after too many without a new checkpoint.

    Args:
        max_in_a_row: number of restarts from the same checkpoint.
        num_ranks: number of ranks of each learner in the beginning.
        group_size: ranks of a tensor group; without one of them, the others have no use.
    """

    def __init__(self, max_in_a_row: int, num_ranks: int = 1, group_size: int = 1) -> None:
        self._max_in_a_row, self._num_ranks = max_in_a_row, num_ranks
        self._group_size = group_size
        self._num_in_a_row, self._version = 0, -1
        self.num_restarts = 0
        """Number of restarts so far."""

        self.lost_gpus: frozenset[int] = frozenset()
        """Numbers of the GPUs whose ranks could not be started again."""

    @classmethod
    def of(cls, config: LearningConfig, team: Team) -> "Restarts":
        """Return the counter of a run, none made yet."""
        learners = [member.learner or config.learner for member in team.members.values()]
        return cls(
            max(learner.max_restarts for learner in learners),
            max(learner.ranks for learner in learners),
            math.lcm(*(learner.tensor_parallel for learner in learners)),
        )

    def count(self, error: Exception, version: int) -> None:
        """Count a restart from the checkpoint of update `version`, and print a line about it.

        Raises: `error` if no rank failed; RankFailed if that is one restart too many.
        """
        failure = RankFailed.found_in(error)
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
        fewer = ""
        if isinstance(failure, RankNotStarted):
            gpus = gpus_of(self._num_ranks, self.lost_gpus)
            self.lost_gpus |= {gpus[failure.rank]}
            before, left = self._num_ranks, self._num_ranks - 1
            self._num_ranks = left // self._group_size * self._group_size or left
            fewer = f" with {self._num_ranks} instead of {before} --learner.ranks"
        print(
            f"{failure}. Restart {self._num_in_a_row} of at most {self._max_in_a_row}: the run "
            f"continues after update {version}{fewer}",
            flush=True,
        )

    def remaining(
        self, config: LearningConfig, model: Trainable
    ) -> tuple[LearningConfig, Trainable]:
        """Return the settings of a run, and its policies, with the ranks that are left."""
        if not self.lost_gpus:
            return config, model
        if isinstance(model, Team):
            members = {
                name: replace(member, learner=member.learner and self._fewer(member.learner))
                for name, member in model.members.items()
            }
            model = replace(model, members=members)
        return msgspec.structs.replace(config, learner=self._fewer(config.learner)), model

    def explained(self, refused: ConfigError) -> ConfigError | RankFailed:
        """Return the error of a restart whose settings were refused."""
        if not self.lost_gpus:
            return refused
        failure = RankFailed(
            f"the run cannot continue with {self._num_ranks} of its ranks: {refused}; continue it "
            "with --resume on devices that fit"
        )
        failure.__cause__ = refused
        return failure

    def _fewer(self, learner: LearnerConfig) -> LearnerConfig:
        if self._num_ranks == 1:
            return msgspec.structs.replace(
                learner, ranks=1, shard="gradients", offload=False, tensor_parallel=1
            )
        # fewer ranks than one group has: each reads whole layers, if they fit
        size = 1 if self._num_ranks % learner.tensor_parallel else learner.tensor_parallel
        return msgspec.structs.replace(learner, ranks=self._num_ranks, tensor_parallel=size)
