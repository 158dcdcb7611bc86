"""Configurations of learners: optimizer, policy, critic, imitation. They import in an instant, without torch."""

from typing import Literal, NamedTuple

from vla_rl.algorithms.losses import PolicyLossConfig, ValueLossConfig
from vla_rl.types import Config


class MicroBatchSize(NamedTuple):
    """How much goes into one forward pass."""

    rows: int
    tokens: int | None = None
    """Padding included; None: no limit."""


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """AdamW, its warm-up and its safety."""

    lr: float = 1e-4
    """Learning rate after the warm-up. The first Adam steps move every parameter by about this much."""

    warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises linearly from lr / warmup_steps."""

    decay_steps: int | None = None
    """Optimizer steps over which it falls on a cosine to `final_lr_share`, warm-up included; none keeps it constant."""

    final_lr_share: float = 0.05
    """Share of `lr` that is left at the end of the decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of Adam's two moving averages."""

    weight_decay: float = 0.0
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters."""

    max_skips_in_a_row: int = 3
    """A step whose gradient is not finite is skipped; after this many one after another the run ends with an error."""

    def __post_init__(self) -> None:
        self.require(self.lr > 0.0, "lr", "above 0")
        self.require(self.warmup_steps >= 0, "warmup_steps", "at least 0 steps")
        decays = self.decay_steps is None or self.decay_steps > self.warmup_steps
        self.require(decays, "decay_steps", f"more than warmup_steps = {self.warmup_steps}, or none")
        self.require(0.0 <= self.final_lr_share <= 1.0, "final_lr_share", "a share between 0 and 1")
        self.require(all(0.0 <= beta < 1.0 for beta in self.betas), "betas", "two numbers in [0, 1)")
        self.require(self.weight_decay >= 0.0, "weight_decay", "at least 0")
        self.require(self.max_grad_norm > 0.0, "max_grad_norm", "above 0")
        self.require(self.max_skips_in_a_row >= 1, "max_skips_in_a_row", "at least 1 step")


class LearnerConfig(Config, frozen=True, kw_only=True):
    """How trajectories and advantages become one update."""

    optimizer: OptimizerConfig = OptimizerConfig()

    loss: PolicyLossConfig = PolicyLossConfig()
    """The loss of every token; the default is the clipped surrogate, a trust region."""

    micro_batch: int = 32
    """Rows (decisions, or conversations) in one forward and backward pass; sets memory and speed, never the gradient."""

    micro_batch_tokens: int | None = None
    """Of a language policy: most tokens of prompts and replies in one pass, padding included, beside `micro_batch`; short
    rows are packed beside each other."""

    minibatch_trajectories: int | None = None
    """Trajectories per optimizer step; none takes all of an update in one step."""

    epochs: int = 1
    """How often an update goes over its trajectories."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    aggregation: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "seq_mean_token_mean"
    )
    """How token losses become one number; the first weighs every trajectory the same (SRPO), the last is Dr. GRPO's."""

    trajectory_length: float | None = None
    """What `seq_mean_token_sum_norm` divides by, and needs: a constant, such as the tokens of the longest trajectory."""

    max_mismatch: float = 0.05
    """Largest mean |log-prob of the learner - log-prob of the engine| over the first update's tokens that the very same
    weights chose; above it the run ends, because the ratio has to begin at 1."""

    seed: int = 0
    """Seed of the order of the mini-batches."""

    def __post_init__(self) -> None:
        self.require(self.micro_batch >= 1, "micro_batch", "at least 1 decision")
        by_tokens = self.micro_batch_tokens is None or self.micro_batch_tokens >= 1
        self.require(by_tokens, "micro_batch_tokens", "at least 1 token, or none")
        several = self.minibatch_trajectories is None or self.minibatch_trajectories >= 1
        self.require(several, "minibatch_trajectories", "at least 1 trajectory, or none")
        self.require(self.epochs >= 1, "epochs", "at least 1")
        self.require(self.entropy_coef >= 0.0, "entropy_coef", "at least 0")
        by_length = self.aggregation == "seq_mean_token_sum_norm"
        fits = (self.trajectory_length or 0.0) > 0.0 if by_length else self.trajectory_length is None
        needed = "a number of tokens above 0" if by_length else "none: only seq_mean_token_sum_norm divides by it"
        self.require(fits, "trajectory_length", needed)
        self.require(self.max_mismatch > 0.0, "max_mismatch", "above 0")

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)

    @property
    def steps_once_per_update(self) -> bool:
        """True where an update is one optimizer step, so that no weights exist between two versions."""
        return self.minibatch_trajectories is None and self.epochs == 1


class CriticConfig(Config, frozen=True, kw_only=True):
    """How values are judged and learnt, in pipelines that have a critic."""

    trunk: Literal["shared", "own"] = "own"
    """What the value head sees: `own`, a copy of the policy's trunk that is trained with it; or `shared`, the policy's trunk
    as it is, which costs no memory and gets no gradient from the values."""

    hidden: int = 64
    """Width of the value head's hidden layer."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)

    value_scale: float = 1.0
    """Values are learnt in units of this: about the size of a typical return."""

    loss: ValueLossConfig = ValueLossConfig()
    """Its numbers are in units of `value_scale`."""

    micro_batch: int = 256
    """Observations in one forward and backward pass; sets memory and speed, never the gradient."""

    micro_batch_tokens: int | None = None
    """Of a language policy: most tokens of prompts in one pass, padding included, beside `micro_batch`."""

    minibatch_trajectories: int | None = None
    """Trajectories per optimizer step; none takes all of an update in one step."""

    epochs: int = 4
    """How often an update goes over its trajectories."""

    warmup_updates: int = 0
    """In the first so many updates only the critic learns, and the policy waits."""

    def __post_init__(self) -> None:
        self.require(self.hidden >= 1, "hidden", "at least 1 unit")
        self.require(self.value_scale > 0.0, "value_scale", "above 0")
        several = self.minibatch_trajectories is None or self.minibatch_trajectories >= 1
        self.require(several, "minibatch_trajectories", "at least 1 trajectory, or none")
        by_tokens = self.micro_batch_tokens is None or self.micro_batch_tokens >= 1
        self.require(by_tokens, "micro_batch_tokens", "at least 1 token, or none")
        for field in ("micro_batch", "epochs"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.warmup_updates >= 0, "warmup_updates", "at least 0 updates")

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)


class ImitationConfig(Config, frozen=True, kw_only=True):
    """How demonstrations become one update."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=50)

    micro_batch: int = 32
    """Demonstrated chunks in one forward and backward pass; sets memory and speed, never the gradient."""

    micro_batch_tokens: int | None = None
    """Of a language policy: most tokens in one pass, padding included, beside `micro_batch`."""

    def __post_init__(self) -> None:
        self.require(self.micro_batch >= 1, "micro_batch", "at least 1 chunk")
        by_tokens = self.micro_batch_tokens is None or self.micro_batch_tokens >= 1
        self.require(by_tokens, "micro_batch_tokens", "at least 1 token, or none")

    @property
    def micro_batch_size(self) -> MicroBatchSize:
        """Both limits of a micro-batch."""
        return MicroBatchSize(self.micro_batch, self.micro_batch_tokens)
