"""A learner over several processes.

Each has a part of the rows, the gradients and the optimizer's state.

learner     `ShardedLearner`, its critic, and `ShardedImitator`: `Learner`, `Critic`, `Imitator` over ranks
weights     `ShardedWeights`: what the ranks train; steps, publication, state
publication   the ranks' weights to every engine, and to the model of this process
group       `RankGroup`: starts the ranks, ends all if one fails
rank_hosts  host and device of each rank, its start, its files on other hosts
rank        `LearnerRank`: the actor of one rank
host_rank   the part of that actor which matters on another host: files, network, clock, code
rendezvous  how ranks find each other
rank_parts  the networks of one rank: policy, critic, reference
shared_training   a network that ranks train, and this rank's shard of it
sharding    FSDP2 and tensor parallelism on a network, by the rules that keep sums of gradients right
state       a rank's part of weights and optimizer, in files that any number of ranks can read
messages    rows, sums and weights on their way between processes
rank_times  who computes, who waits for whom

One process needs none of this and does not import it.
"""

from vla_rl.errors import RankFailed
from vla_rl.learner.distributed.learner import ShardedImitator, ShardedLearner

__all__ = ["RankFailed", "ShardedImitator", "ShardedLearner"]
