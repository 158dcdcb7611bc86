"""Configurations of the optimizer, the policy learner, the critic and imitation learning.

Importing them does not import torch.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeAlias

import msgspec
from msgspec.structs import replace

from vla_rl.algorithms.losses import PolicyLossConfig, ValueLossConfig
from vla_rl.types import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    Share,
)


class MicroBatchSize(NamedTuple):
    """Limits on the size of one forward pass."""

    rows: int
    tokens: int | None = None
    """Maximum number of tokens, padding included; None sets no limit."""


Beta: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""Share of an average that stays at each step."""


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW settings: learning-rate schedule, gradient clipping, and the limit on skipped steps."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("final_lr_share",), "decay_steps"),)

    lr: PositiveFloat = 1e-4
    """Learning rate after the warm-up. Each of the first Adam steps changes every parameter by
    about this much."""

    warmup_steps: NonNegativeInt = 10
    """Optimizer steps over which the learning rate rises linearly, starting at lr /
    warmup_steps."""

    decay_steps: int | Literal["run"] | None = None
    """Optimizer step, counted from the start of training, at which the cosine decay to
    `final_lr_share` ends. run: the last step of the run, if that is longer than the warm-up; none
    keeps the learning rate constant after the warm-up."""

    final_lr_share: Share = 0.05
    """Share of `lr` that is left at the end of the decay."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of Adam's moving averages of the gradient and of its square."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; 0 turns it off."""

    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient over all parameters; larger gradients are scaled down to it."""

    max_skips_in_a_row: PositiveInt = 3
    """A step whose gradient is not finite is skipped. After this many skips in a row the run ends
    with an error."""

    def __post_init__(self) -> None:
        # the decay is over the steps after the warm-up: with none of them left it would divide by 0
        decays = not isinstance(self.decay_steps, int) or self.decay_steps > self.warmup_steps
        self.require(
            decays, "decay_steps", f"more than warmup_steps = {self.warmup_steps}, run, or none"
        )

    def over_run(self, num_steps: int) -> Self:
        """Return the settings of a run of this many optimizer steps, whose decay ends at a number."""
        if self.decay_steps != "run":
            return self
        return replace(self, decay_steps=num_steps if num_steps > self.warmup_steps else None)


class LearnerConfig(Config, frozen=True, kw_only=True):
    """Settings of a policy update from trajectories and their advantages."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("trajectory_length",), "aggregation", ("seq_mean_token_sum_norm",)),
    )

    optimizer: OptimizerConfig = OptimizerConfig()

    loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss of each token; the default, PPO's clipped surrogate, has a trust region."""

    micro_batch: PositiveInt = 32
    """Rows (decisions or conversations) per forward and backward pass. It changes memory and speed,
    never the gradient."""

    micro_batch_tokens: PositiveInt | None = None
    """Language policies only: maximum tokens per pass (prompts, replies and padding), in addition
    to `micro_batch`. Short rows are packed together. none sets no limit."""

    minibatch_trajectories: PositiveInt | None = None
    """Trajectories per optimizer step; none takes all trajectories of an update in one step."""

    epochs: PositiveInt = 1
    """Number of passes over the trajectories of an update."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0 turns it off. Raise it if the policy explores too little."""

    aggregation: Literal[
        "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "seq_mean_token_mean"
    """Method that reduces token losses to one number. `seq_mean_token_mean` weighs every trajectory
    the same (SRPO); `seq_mean_token_sum_norm` is Dr. GRPO's."""

    trajectory_length: PositiveFloat | None = None
    """Divisor that `seq_mean_token_sum_norm` requires: a constant, such as the number of tokens of
    the longest possible trajectory. Leave it at none for the other aggregations."""

    max_mismatch: PositiveFloat = 0.05
    """Largest accepted mean |learner's log-prob - engine's log-prob| in the first update, over the
    tokens that the same weights chose. Above it the run ends with an error, because the probability
    ratio has to start at 1."""

    stop_kl: PositiveFloat | None = None
    """End an update before an optimizer step whose mini-batch is further than this from the weights that
    acted, in mean KL per token: exact for flow policies, else by the estimator k3. The first step is always
    taken. none takes all steps."""

    prefix_cache_gib: NonNegativeFloat = 2.0
    """With several epochs, memory in GiB, of each rank, for what a flow policy computes from observations
    alone. It is computed once an update instead of in each epoch, and beyond this limit again. Only with a
    prefix that is not trained (`train expert`). 0 keeps nothing."""

    seed: int = 0
    """Seed of the order of the mini-batches."""

    ranks: PositiveInt = 1
    """Processes that share the update, each with its part of the rows and of the optimizer's state:
    one for each GPU, or on the CPU one for each core. 1 computes in this process."""

    shard: Literal["gradients", "weights", "replicas"] = "gradients"
    """With several ranks, what each holds. gradients: whole weights during an update, and its share
    of masters and moments. weights: its share of the weights too, for less memory and more
    communication. replicas: all of it, for adapters, which are small."""

    offload: bool = False
    """With several ranks, keep float32 masters, moments and reduced gradients in host memory. It
    frees GPU memory (16 bytes for each trained number, over all ranks); the optimizer steps on the
    CPU, which takes longer."""

    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer of the trunk: heads and feed-forward parts are dealt to them, and
    they read the same rows. It divides `ranks`, the trunk's heads, and the memory of whole weights
    and gradients. Take it if a policy does not fit otherwise; 1 shares rows alone."""

    max_restarts: NonNegativeInt = 3
    """With several ranks, maximum number of restarts in a row: after a rank died, froze or failed,
    the run starts again from its newest checkpoint. A newer checkpoint starts the count again. 0
    ends the run at the first failure."""

    def __post_init__(self) -> None:
        is_used = self.shard == "gradients" or self.ranks > 1
        self.require(is_used, "shard", "gradients with one rank, which has nothing to share")
        self.require(not self.offload or self.ranks > 1, "offload", "False with one rank")
        # groups of rows are counted by this division: a rank that is left over would be in none
        fits = self.ranks % self.tensor_parallel == 0
        self.require(fits, "tensor_parallel", f"a divisor of ranks = {self.ranks}")
        # asked for and not counted from the data: a divisor that follows the longest episode of an
        # update changes the size of a step
        by_length = self.aggregation == "seq_mean_token_sum_norm"
        needed = "a number" if by_length else "none: only seq_mean_token_sum_norm divides by it"
        fits = by_length == (self.trajectory_length is not None)
        self.require(fits, "trajectory_length", needed)

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)

    @property
    def row_groups(self) -> int:
        """Number of groups of ranks that rows are dealt to: the ranks, without tensor parallelism."""
        return self.ranks // self.tensor_parallel

    @property
    def steps_once_per_update(self) -> bool:
        """Whether an update is one optimizer step: no weights exist between two versions."""
        return self.minibatch_trajectories is None and self.epochs == 1


class CriticConfig(Config, frozen=True, kw_only=True):
    """Settings of the critic and its updates, in pipelines that have one."""

    trunk: Literal["shared", "own"] = "own"
    """Input of the value head. `own`: features of a copy of the policy's trunk, which is trained
    with the head. `shared`: features of the policy's trunk, which needs no memory and gets no
    gradient from the values."""

    hidden: PositiveInt = 64
    """Width of the value head's hidden layer."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)

    value_scale: PositiveFloat = 1.0
    """Unit in which the critic learns values, > 0; set it to about the size of a typical return."""

    loss: ValueLossConfig = ValueLossConfig()
    """Loss of the values; its parameters are in units of `value_scale`."""

    micro_batch: PositiveInt = 256
    """Observations per forward and backward pass. It changes memory and speed, never the
    gradient."""

    micro_batch_tokens: PositiveInt | None = None
    """Language policies only: maximum tokens per pass (prompts and padding), in addition to
    `micro_batch`; none sets no limit."""

    minibatch_trajectories: PositiveInt | None = None
    """Trajectories per optimizer step; none takes all trajectories of an update in one step."""

    epochs: PositiveInt = 4
    """Number of passes over the trajectories of an update."""

    warmup_updates: NonNegativeInt = 0
    """Number of updates at the start in which only the critic is trained; the policy does not
    change."""

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)


class ImitationConfig(Config, frozen=True, kw_only=True):
    """Settings of a supervised update from demonstrations."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=50)

    micro_batch: PositiveInt = 32
    """Demonstrated chunks per forward and backward pass. It changes memory and speed, never the
    gradient."""

    micro_batch_tokens: PositiveInt | None = None
    """Language policies only: maximum tokens per pass, padding included, in addition to
    `micro_batch`; none sets no limit."""

    label_width: NonNegativeFloat = 0.0
    """Standard deviation, in bins, of the Gaussian over neighbouring bins that is learnt instead of
    each demonstrated action token alone, because the next bin is nearly right (HL-Gauss, Imani and
    White 2018, arXiv:1806.04613). Fine bins are learnt from far fewer demonstrations. 0: the token
    alone. For OpenVLA-OFT with the tokens head, in one process."""

    ranks: PositiveInt = 1
    """Processes that share the update, each with its part of the demonstrations and of the
    optimizer's state: one for each GPU, or on the CPU one for each core. 1 computes in this
    process."""

    shard: Literal["gradients", "weights", "replicas"] = "gradients"
    """With several ranks, what each holds, as `LearnerConfig.shard`."""

    offload: bool = False
    """With several ranks, keep float32 masters, moments and reduced gradients in host memory."""

    def __post_init__(self) -> None:
        self.optimizer.require(
            self.optimizer.decay_steps != "run",
            "decay_steps",
            "the number of updates, or none: a supervised run does not set it by itself",
        )
        # ranks call `log_probs` alone, the method for which FSDP gathers weights
        is_possible = self.label_width == 0.0 or self.ranks == 1
        self.require(is_possible, "label_width", "0 with several ranks")
        is_used = self.shard == "gradients" or self.ranks > 1
        self.require(is_used, "shard", "gradients with one rank, which has nothing to share")
        self.require(not self.offload or self.ranks > 1, "offload", "False with one rank")

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)


class RecapValueConfig(Config, frozen=True, kw_only=True):
    """Value network of RECAP: an MLP on frozen features, trained on the returns of stored episodes."""

    width: PositiveInt = 256
    """Width of its two hidden layers."""

    bins: Annotated[int, msgspec.Meta(ge=2)] = 51
    """Values over which it predicts a distribution, evenly from -1 to 0; 201 in the paper, which has far
    more data."""

    updates: PositiveInt = 500
    """Optimizer steps of each network."""

    batch: PositiveInt = 256
    """Control steps in one optimizer step, drawn at random."""

    lr: PositiveFloat = 1e-3
    """Learning rate."""

    folds: PositiveInt = 5
    """Parts into which the episodes are divided: each part's values come from a network that was trained
    on the others. A network that has seen a short data set knows its returns by heart, and then no step is
    better than expected. 1: one network, trained on all, as in the paper."""
