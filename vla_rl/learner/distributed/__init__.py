"""A learner over several processes.

Each has a part of the rows, the gradients and the optimizer's state.

learner     `ShardedLearner`: the methods of `Learner`, computed by ranks
ranks       `RankPasses`: gives each rank its rows, and takes weights and state back
publication   the ranks' weights to every engine, and to the model of this process
rank_shares, rank_share, share_giver   all ranks' shares of the weights for other hosts; one rank's; its link
imitation   `ShardedImitator`: supervised learning, computed by ranks
critic      `RankCriticPasses`: the same for a critic
group       `RankGroup`: starts the ranks, and ends all if one fails
starting    how the ranks of a group are started, and meet
rank        `LearnerRank`: the actor of one rank
seats       host and device of each rank
far_hosts, far_rank   files, network and clock of ranks on other hosts
meeting     how ranks find each other; same_code: whether hosts have the same code
rank_parts  the networks of one rank: policy, critic, reference
shared_training   a network that ranks train: passes, steps and state
parallel    FSDP2 on a policy, by the rules that keep sums of gradients right
meshes      which ranks share rows, layers, and everything else
cutting     tensor parallelism on a policy's layers
gradient_norm   the norm of gradients over all meshes
place       position of a rank's part in a whole tensor
staged      tensors that the ranks have copied and write in place
state       a rank's part of weights and optimizer, in files that any number of ranks can read
messages    rows, sums and weights on their way between processes

One process needs none of this and does not import it.
"""

from vla_rl.errors import RankFailed
from vla_rl.learner.distributed.imitation import ShardedImitator
from vla_rl.learner.distributed.learner import ShardedLearner

__all__ = ["RankFailed", "ShardedImitator", "ShardedLearner"]
