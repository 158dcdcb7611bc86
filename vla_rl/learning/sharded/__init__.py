"""A learner over several processes, each with a part of the rows, the gradients and the optimizer's
state.

learner     `ShardedLearner`: the methods of `Learner`, computed by ranks
ranks       `RankPasses`: starts the ranks, gives each its rows, and ends all if one fails
rank        `LearnerRank`: the actor of one rank
parallel    FSDP2 on a policy, by the rules that keep sums of gradients right
state       a rank's part of weights and optimizer, in files that any number of ranks can read
messages    rows, sums and weights on their way between processes

One process needs none of this and does not import it.
"""

from vla_rl.learning.sharded.learner import ShardedLearner
from vla_rl.learning.sharded.ranks import RankFailed

__all__ = ["RankFailed", "ShardedLearner"]
