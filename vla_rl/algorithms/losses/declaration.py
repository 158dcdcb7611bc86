"""Declaration of a policy loss: its function, parameters with defaults, what it needs, what it reports.

    class CpgdLossConfig(Config, frozen=True, kw_only=True):
        clip_low: ClipLow = 0.2

        drift_coef: NonNegativeFloat = 1e-3

    @declare_loss("cpgd", terms_without_advantage=("drift_coef",))
    def cpgd(batch: TokenBatch, config: CpgdLossConfig) -> LossResult:

The fields of the configuration are the parameters, and a string under a field is the help of its
option. Each file in `policy` declares the losses of one
family; nothing else lists them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import msgspec

from vla_rl.algorithms.losses.token_batch import RatioLevel, TokenBatch
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config


@dataclass(frozen=True)
class Diagnostics:
    """Sums over the unmasked tokens of one micro-batch, kept on the device.

    `a + b` combines micro-batches exactly.

    Attributes: float32 [] tensors without gradient.
        num_tokens: number of unmasked tokens.
        ratio_sum, ratio_max: sum and maximum of the ratio that the loss uses, at its level.
        k1_sum, k3_sum: sums over tokens of estimates of KL(behavior policy || policy).
        num_clipped: number of tokens whose loss a clip changed.
        num_dropped: number of tokens that a mask of the loss or the engine's correction dropped.
        extra_sums: other values that one loss reports, by name; logged as means over tokens.
    """

    num_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    num_clipped: Tensor
    num_dropped: Tensor
    extra_sums: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        """Combine the diagnostics of two micro-batches."""
        names = dict.fromkeys([*self.extra_sums, *other.extra_sums])
        zero = torch.zeros_like(self.num_tokens)
        return Diagnostics(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            k1_sum=self.k1_sum + other.k1_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            num_clipped=self.num_clipped + other.num_clipped,
            num_dropped=self.num_dropped + other.num_dropped,
            extra_sums={
                name: self.extra_sums.get(name, zero) + other.extra_sums.get(name, zero)
                for name in names
            },
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; empty if every token was masked.

        They are `ratio_mean`, `ratio_max`, `kl_k1`, `kl_k3`, `clip_fraction`, `dropped_fraction`
        and the extra metrics.
        """
        num_tokens = float(self.num_tokens)
        if num_tokens == 0.0:
            return {}
        return {
            "ratio_mean": float(self.ratio_sum) / num_tokens,
            "ratio_max": float(self.ratio_max),
            "kl_k1": float(self.k1_sum) / num_tokens,
            "kl_k3": float(self.k3_sum) / num_tokens,
            "clip_fraction": float(self.num_clipped) / num_tokens,
            "dropped_fraction": float(self.num_dropped) / num_tokens,
            **{name: float(value) / num_tokens for name, value in self.extra_sums.items()},
        }


def diagnose(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level_log_ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    dropped: Tensor | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> Diagnostics:
    """Compute the diagnostics of one micro-batch.

    Args:
        log_ratio: float [B, T], token by token, finite; masked entries do not count.
        mask: bool [B, T].
        level_log_ratio: float [B, T], the ratio that the loss uses, if it is not the token's own.
        clipped, dropped: bool [B, T].
        extra: float [B, T] by name, to be averaged over tokens.

    Example:
        diagnostics.metrics() -> {"ratio_mean": 1.02, "ratio_max": 1.4, "kl_k1": 0.003, "kl_k3": 0.004,
                                  "clip_fraction": 0.01, "dropped_fraction": 0.0}
    """
    log_ratio = log_ratio.detach().float()
    weight = mask.float()
    ratio = (log_ratio if level_log_ratio is None else level_log_ratio.detach().float()).exp()
    # sums and counts instead of means: micro-batches of different sizes add up exactly, and nothing
    # waits for the device before the update ends
    zero = weight.sum() * 0.0
    return Diagnostics(
        num_tokens=weight.sum(),
        ratio_sum=(ratio * weight).sum(),
        ratio_max=(ratio * weight).max() if mask.numel() else zero,
        k1_sum=(-log_ratio * weight).sum(),
        k3_sum=((torch.expm1(log_ratio) - log_ratio) * weight).sum(),
        num_clipped=zero if clipped is None else (clipped & mask).float().sum(),
        num_dropped=zero if dropped is None else (dropped & mask).float().sum(),
        extra_sums={
            name: torch.where(mask, value.detach().float(), 0.0).sum()
            for name, value in (extra or {}).items()
        },
    )


LossResult: TypeAlias = tuple[Tensor, Diagnostics]
"""Losses float [B, T], exact zeros where masked, and diagnostics that add up over micro-batches."""

LossFunction = TypeVar("LossFunction", bound=Callable[..., LossResult])


# parameters that most losses have: the help of their options names no loss
Level: TypeAlias = Annotated[
    RatioLevel,
    msgspec.Meta(
        description="Unit whose probability ratio is clipped: token, action (one control step), "
        "chunk, or sequence (length-normalised)."
    ),
]
ClipLow: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, le=1, description="The ratio is clipped below 1 minus this value.")
]
ClipHigh: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, description="The ratio is clipped above 1 plus this value.")
]
DualClip: TypeAlias = Annotated[
    float,
    msgspec.Meta(
        gt=1,
        description="Bound on the loss of tokens with a negative advantage and a large ratio; none "
        "turns it off.",
    ),
]


@dataclass(frozen=True)
class DeclaredLoss:
    """A policy loss with what a learner has to know about it."""

    name: str
    function: Callable[..., LossResult]
    config: type[Config]
    """Class of its parameters."""

    has_trust_region: bool = True
    """Whether something limits how far it moves the policy away from the weights that chose the
    data."""

    needs_proximal: bool = False
    """Whether it weighs by the learner's own log-probs from before the update, which excludes an
    engine correction."""

    is_of_sequences: bool = False
    """Whether its ratio is that of the whole sequence at every level, so that rows of one sequence
    need `TokenBatch.sequence_log_ratio`."""

    averaged: Callable[..., Tensor] | None = None
    """Function of (log_ratio, advantage, configuration): the quantity that is averaged over a
    sequence. None averages the log-ratio itself."""

    needs_sequence_drift: bool = False
    """Whether rows of one sequence need `TokenBatch.sequence_drift`."""

    needs_predictions: bool = False
    """Whether it compares a flow's predictions, which only a policy with the method `predict` gives."""

    choose_tokens: Callable[..., Tensor] | None = None
    """Function of a batch and the configuration that returns `TokenBatch.chosen_tokens`, if it
    chooses tokens from the whole mini-batch."""

    terms_without_advantage: tuple[str, ...] = ()
    """Weights of terms that have a gradient even if every advantage is 0."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default of each parameter."""
        return MappingProxyType(msgspec.structs.asdict(self.config()))


# filled by the decorator, so that a loss is one file: a table here would be the second place to
# change
_DECLARED: Final[dict[str, DeclaredLoss]] = {}


def declare_loss(name: str, **needs: Any) -> Callable[[LossFunction], LossFunction]:
    """Declare the decorated function of a batch and a configuration as the loss `name`.

    Args:
        name: name of the loss in configurations.
        needs: fields of `DeclaredLoss` that differ from their defaults.

    Raises: TypeError for a function whose `config` is not annotated with a `Config`, or a parameter
        without a default; ValueError for a name that is taken.
    """

    def declare(function: LossFunction) -> LossFunction:
        # the second one would win by the order of imports, which nobody chose
        if name in _DECLARED:
            raise ValueError(f"policy loss {name!r} is declared twice; rename one")
        config = get_type_hints(function).get("config")
        if not (isinstance(config, type) and issubclass(config, Config)):
            raise TypeError(f"{function.__qualname__}: `config` needs a subclass of Config as type")
        _DECLARED[name] = DeclaredLoss(name, function, config, **needs)
        config()  # the options of the command line have defaults
        return function

    return declare


def declared_losses() -> Mapping[str, DeclaredLoss]:
    """Return all declared losses: the default first, the others by name."""
    names = sorted(_DECLARED, key=lambda name: (name != "ppo", name))
    return MappingProxyType({name: _DECLARED[name] for name in names})


PolicyLoss: TypeAlias = Callable[[TokenBatch], tuple[Tensor, Diagnostics]]
"""Function that returns losses float [B, T], exact zeros where masked, and diagnostics that add up
over micro-batches."""
