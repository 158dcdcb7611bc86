"""Settings of off-policy learning: the algorithm by name, its networks, batches and weights.

Importing them does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

import msgspec

from vla_rl.learner.config import OptimizerConfig
from vla_rl.types import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    Share,
)

Algorithm: TypeAlias = Literal[
    "rlt",
    "td3_bc",
    "sac",
    "cql",
    "rlpd",
    "dsrl",
    "iql",
    "awr",
    "filtered_bc",
    "dagger",
]


@dataclass(frozen=True)
class Defaults:
    """Values that an algorithm gives to the settings that are left at none."""

    num_critics: int = 2
    target_critics: int = 2
    updates_per_decision: float = 1.0
    actor_every: int = 1
    demonstration_share: float | None = None
    success_share: float | None = None


DEFAULTS: Final[Mapping[str, Defaults]] = MappingProxyType(
    {
        "rlt": Defaults(actor_every=2),
        "td3_bc": Defaults(actor_every=2, success_share=0.9),
        "sac": Defaults(),
        "cql": Defaults(success_share=0.9),
        "rlpd": Defaults(num_critics=10, updates_per_decision=20.0, demonstration_share=0.5),
        "dsrl": Defaults(num_critics=10, target_critics=10, updates_per_decision=20.0),
        "iql": Defaults(),
        "awr": Defaults(),
        "filtered_bc": Defaults(success_share=1.0),
        "dagger": Defaults(success_share=0.2),
    }
)

IMITATING: Final = ("filtered_bc", "dagger")
"""Algorithms without a critic."""

DETERMINISTIC: Final = ("rlt", "td3_bc")
"""Algorithms whose actor is its mean; acting adds the head's own noise."""

ENTROPIC: Final = ("sac", "cql", "rlpd", "dsrl")
"""Algorithms with an entropy bonus."""

WEIGHTED: Final = ("iql", "awr")
"""Algorithms that imitate executed actions, weighted by their advantage."""

WITH_Q: Final = (*DETERMINISTIC, *ENTROPIC, "iql")
"""Algorithms with critics of actions."""


class RampConfig(Config, frozen=True, kw_only=True):
    """A weight that changes linearly over the gradient steps of the actor."""

    first: NonNegativeFloat
    """Weight at first."""

    last: NonNegativeFloat
    """Weight after the change."""

    begin: NonNegativeInt = 0
    """Gradient step at which the change begins, counted from the run's first."""

    steps: NonNegativeInt = 0
    """Gradient steps that the change takes; 0 has the last weight from `begin` on."""

    def value_at(self, step: int) -> float:
        """Return the weight at a gradient step, counted from 0."""
        if self.steps == 0:
            return self.last if step >= self.begin else self.first
        progress = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return self.first + (self.last - self.first) * progress


class CriticNetworkConfig(Config, frozen=True, kw_only=True):
    """The critics: their networks and the bootstrap that they are trained on."""

    hidden: Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)] = (256, 256)
    """Widths of the hidden layers."""

    layer_norm: bool = True
    """Normalise each hidden layer, which keeps values of actions that nothing has tried in bounds
    (Ball et al. 2023, arXiv:2302.02948)."""

    num: PositiveInt | None = None
    """Critics of the ensemble. None: 10 for rlpd and dsrl, else 2."""

    targets: PositiveInt | None = None
    """Target critics, drawn anew for each gradient step, whose minimum is the bootstrap. None: 2; all
    10 for dsrl."""

    tau: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.005
    """Share of the weights that target networks take over from the trained ones at each gradient
    step."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-4, warmup_steps=0, max_grad_norm=10.0)


class OffPolicyConfig(Config, frozen=True, kw_only=True):
    """Off-policy learning of a head over a frozen policy, from all episodes in a replay buffer."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("bc", "q", "reference_dropout"), "algorithm", ("rlt",)),
        ReadIf(("alpha",), "algorithm", ("td3_bc",)),
        ReadIf(("target_noise", "target_noise_clip"), "algorithm", DETERMINISTIC),
        ReadIf(("cql_weight", "cql_actions"), "algorithm", ("cql",)),
        ReadIf(
            ("initial_temperature", "target_entropy", "entropy_in_targets"), "algorithm", ENTROPIC
        ),
        ReadIf(("advantage_temperature", "max_weight"), "algorithm", WEIGHTED),
        ReadIf(("expectile",), "algorithm", ("iql",)),
        ReadIf(("critic_first_steps", "return_range"), "algorithm", (*WITH_Q, "awr")),
        ReadIf(("actor_every", "bootstrap"), "algorithm", WITH_Q),
    )

    algorithm: Algorithm = "td3_bc"
    """rlt, td3_bc: a deterministic actor with a pull towards the base's chunk; sac, cql, rlpd, dsrl: a
    Gaussian actor with an entropy bonus; iql, awr: imitation weighted by advantage; filtered_bc:
    imitation of successes; dagger: imitation of an expert's labels."""

    gamma: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.996
    """Discount of one control step; a chunk of 8 is discounted by 0.996^8 = 0.97."""

    bootstrap: bool = True
    """Whether an episode that a limit cut off is worth what the critic expects behind the limit. False: the
    limit is part of the task, and what has not succeeded by then has failed."""

    batch: PositiveInt = 256
    """Rows of one gradient step."""

    updates_per_decision: PositiveFloat | None = None
    """Gradient steps for each new decision in the buffer. None: 20 for rlpd and dsrl, else 1."""

    max_steps: PositiveInt = 5000
    """Most gradient steps of one update; what is left over waits for the next one."""

    offline_steps: PositiveInt = 500
    """Gradient steps of one update of a run that learns from stored episodes alone (`replay.from`)."""

    first_rows: PositiveInt = 1000
    """Decisions in the buffer from which on gradient steps are made; until then the head acts as it
    was made."""

    critic_first_steps: NonNegativeInt = 500
    """First gradient steps, in which the critic alone is trained. An actor that follows a critic
    with random weights forgets what the base can do."""

    actor_every: PositiveInt | None = None
    """Gradient steps of the critic for one of the actor. None: 2 for rlt and td3_bc, else 1."""

    success_share: Share | None = None
    """Share of the actor's rows from successful episodes; the critic's rows are drawn from all, because
    other shares would change what its values mean. None: 0.9 for td3_bc and cql, 1 for filtered_bc,
    0.2 for dagger (the rest has an expert's labels), else as they come."""

    demonstration_share: Share | None = None
    """Share of all rows from demonstrations (`replay.demonstrations`). None: half for rlpd, else as
    they come."""

    return_range: tuple[float, float] | None = (0.0, 1.0)
    """Lowest and highest return that an episode can have, to which targets are clamped: 0 and 1 for a
    reward of 1 at a success. Values outside of it are extrapolation. None: unknown; nothing is clamped."""

    actor: OptimizerConfig = OptimizerConfig(lr=3e-4, warmup_steps=0)

    critic: CriticNetworkConfig = CriticNetworkConfig()

    bc: RampConfig = RampConfig(first=2.8, last=0.5, steps=20_000)
    """Weight of the distance from the base's chunk (or a person's action) in the actor's loss."""

    q: RampConfig = RampConfig(first=0.05, last=0.5, steps=20_000)
    """Weight of the critic's value in the actor's loss."""

    reference_dropout: Share = 0.5
    """Share of rows whose base chunk the actor does not see in an update, so that it does not learn to
    copy it."""

    alpha: PositiveFloat = 2.5
    """Weight of the critic's value, in units of its mean size, beside a weight of 1 for the distance
    from executed actions (Fujimoto and Gu 2021, arXiv:2106.06860)."""

    target_noise: NonNegativeFloat = 0.1
    """Standard deviation of the noise on the target actor's action, in normalised units (TD3)."""

    target_noise_clip: NonNegativeFloat = 0.2
    """Largest such noise."""

    cql_weight: NonNegativeFloat = 0.5
    """Weight of the conservative term, which lowers values of actions that the buffer lacks."""

    cql_actions: PositiveInt = 4
    """Actions drawn for the conservative term, of each kind: uniform, and the actor's here and next."""

    initial_temperature: PositiveFloat = 0.1
    """Weight of the entropy at first; it is trained towards `target_entropy`."""

    target_entropy: float | None = None
    """Entropy, in nats, that the temperature is trained to. None: minus half the numbers of an
    action, of which repeated ones count once."""

    entropy_in_targets: bool = False
    """Whether values count the entropy of later actions. They are no returns then, so leave `return_range`
    at none."""

    advantage_temperature: PositiveFloat = 0.1
    """Advantage that raises the weight of an action e-fold (AWR's β; 1/β of IQL). Smaller imitates
    fewer, better actions."""

    max_weight: PositiveFloat = 20.0
    """Largest such weight."""

    expectile: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.7
    """Expectile of the values, above 0.5: nearer to 1 is nearer to the best action in the buffer."""

    def __post_init__(self) -> None:
        if self.return_range is not None:
            low, high = self.return_range
            self.require(low < high, "return_range", "two numbers, the lower one first, or none")
            self.require(
                not self.entropy_in_targets or self.algorithm not in ENTROPIC,
                "entropy_in_targets",
                "False with a return_range, which values with entropy leave",
            )
        self.critic.require(
            self.target_critics <= self.num_critics,
            "targets",
            f"at most critic.num = {self.num_critics}",
        )
        for name in ("actor", "critic"):
            found: OptimizerConfig = self.actor if name == "actor" else self.critic.optimizer
            found.require(
                found.decay_steps != "run",
                "decay_steps",
                "a number of gradient steps, or none: how many a run makes depends on its episodes",
            )

    @property
    def defaults(self) -> Defaults:
        """Values of the settings that are left at none."""
        return DEFAULTS[self.algorithm]

    @property
    def num_critics(self) -> int:
        """Critics of the ensemble."""
        return self.critic.num or self.defaults.num_critics

    @property
    def target_critics(self) -> int:
        """Target critics whose minimum is the bootstrap."""
        return self.critic.targets or min(self.defaults.target_critics, self.num_critics)

    @property
    def steps_per_decision(self) -> float:
        """Gradient steps for each new decision."""
        return self.updates_per_decision or self.defaults.updates_per_decision

    @property
    def actor_interval(self) -> int:
        """Gradient steps of the critic for one of the actor."""
        return self.actor_every or self.defaults.actor_every

    @property
    def actor_successes(self) -> float | None:
        """Share of the actor's rows from successful episodes; None: as they come."""
        given = self.success_share
        return self.defaults.success_share if given is None else given

    @property
    def demonstrations(self) -> float | None:
        """Share of all rows from demonstrations; None: as they come."""
        given = self.demonstration_share
        return self.defaults.demonstration_share if given is None else given
