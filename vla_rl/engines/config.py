"""Configurations of engines and learners; they import in an instant, without torch."""

from typing import Literal

from vla_rl.types import Config


class EngineConfig(Config, frozen=True, kw_only=True):
    """How decisions are batched."""

    max_batch: int = 16
    """Most decisions computed together."""

    max_wait_s: float = 0.0
    """How long a free device waits for a fuller batch, from the arrival of the oldest request; 0 fires at once."""

    is_deterministic: bool = False
    """Batches of exactly one, so that the last bit of an answer does not depend on who waited beside it."""

    def __post_init__(self) -> None:
        self.require(self.max_batch >= 1, "max_batch", "at least 1 decision")
        self.require(self.max_wait_s >= 0.0, "max_wait_s", "at least 0 seconds")


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

    micro_batch: int = 32
    """Decisions in one forward and backward pass; sets memory and speed, never the gradient."""

    minibatch_trajectories: int | None = None
    """Trajectories per optimizer step; none takes all of an update in one step."""

    epochs: int = 1
    """How often an update goes over its trajectories."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 minus this."""

    clip_high: float = 0.28
    """The ratio is clipped above 1 plus this."""

    dual_clip: float | None = None
    """Bound on the loss of tokens with a negative advantage and a large ratio, above 1; none leaves it out."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    aggregation: Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum"] = "seq_mean_token_mean"
    """How token losses become one number; the first weighs every trajectory the same (SRPO)."""

    seed: int = 0
    """Seed of the order of the mini-batches."""

    def __post_init__(self) -> None:
        self.require(self.micro_batch >= 1, "micro_batch", "at least 1 decision")
        several = self.minibatch_trajectories is None or self.minibatch_trajectories >= 1
        self.require(several, "minibatch_trajectories", "at least 1 trajectory, or none")
        self.require(self.epochs >= 1, "epochs", "at least 1")
        self.require(0.0 <= self.clip_low < 1.0, "clip_low", "in [0, 1)")
        self.require(self.clip_high >= 0.0, "clip_high", "at least 0")
        self.require(self.dual_clip is None or self.dual_clip > 1.0, "dual_clip", "above 1, or none")
        self.require(self.entropy_coef >= 0.0, "entropy_coef", "at least 0")

    @property
    def steps_once_per_update(self) -> bool:
        """True where an update is one optimizer step, so that no weights exist between two versions."""
        return self.minibatch_trajectories is None and self.epochs == 1


class ImitationConfig(Config, frozen=True, kw_only=True):
    """How demonstrations become one update."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=50)

    micro_batch: int = 32
    """Demonstrated chunks in one forward and backward pass; sets memory and speed, never the gradient."""

    def __post_init__(self) -> None:
        self.require(self.micro_batch >= 1, "micro_batch", "at least 1 chunk")
