"""Declaration of a policy loss: its function, parameters with defaults, what it needs, what it reports.

    @declare_loss("cpgd", terms_without_advantage=("drift_coef",))
    def cpgd(
        batch: TokenBatch,
        *,
        clip_low: ClipLow = 0.2,
        drift_coef: Annotated[float, Parameter("Weight of the policy drift.", least=0.0)] = 1e-3,
    ) -> LossResult:

The keyword arguments are the parameters. Each file in `policy` declares the losses of one family;
nothing else lists them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_type_hints

from vla_rl.algorithms.losses.token_batch import RatioLevel, TokenBatch
from vla_rl.algorithms.tensors import Tensor, torch


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


@dataclass(frozen=True)
class Parameter:
    """Help and range of a loss's parameter, for the annotation of the keyword argument."""

    help: str
    """Text of the option, without the names of losses."""

    least: float | None = None
    most: float | None = None

    above: float | None = None
    """Lower bound that is not allowed itself."""

    is_common: bool = False
    """Whether the option's help does not name the losses, because most have the parameter."""

    def accepts(self, value: Any) -> bool:
        """Return whether a value is in range; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    @property
    def range(self) -> str:
        """The range in words."""
        if self.most is not None:
            return f"in [{self.least:g}, {self.most:g}]"
        return f"above {self.above:g}" if self.least is None else f"at least {self.least:g}"


Level: TypeAlias = Annotated[
    RatioLevel,
    Parameter(
        "Unit whose probability ratio is clipped: token, action (one control step), chunk, or "
        "sequence (length-normalised).",
        is_common=True,
    ),
]
ClipLow: TypeAlias = Annotated[
    float,
    Parameter(
        "The ratio is clipped below 1 minus this value.", least=0.0, most=1.0, is_common=True
    ),
]
ClipHigh: TypeAlias = Annotated[
    float, Parameter("The ratio is clipped above 1 plus this value.", least=0.0, is_common=True)
]
DualClip: TypeAlias = Annotated[
    float | None,
    Parameter(
        "Bound, above 1, on the loss of tokens with a negative advantage and a large ratio; none "
        "turns it off.",
        above=1.0,
        is_common=True,
    ),
]


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter of one loss."""

    parameter: Parameter
    hint: Any
    """Type of the argument."""

    default: Any


@dataclass(frozen=True)
class DeclaredLoss:
    """A policy loss with what a learner has to know about it."""

    name: str
    function: Callable[..., LossResult]
    parameters: Mapping[str, DeclaredParameter]

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
    """Function of (log_ratio, advantage) and the loss's parameters: the quantity that is averaged
    over a sequence. None averages the log-ratio itself."""

    needs_sequence_drift: bool = False
    """Whether rows of one sequence need `TokenBatch.sequence_drift`."""

    choose_tokens: Callable[..., Tensor] | None = None
    """Function of a batch and the loss's parameters that returns `TokenBatch.chosen_tokens`, if it
    chooses tokens from the whole mini-batch."""

    terms_without_advantage: tuple[str, ...] = ()
    """Weights of terms that have a gradient even if every advantage is 0."""

    ordered: tuple[str, str] | None = None
    """Two parameters of which the first must not be above the second."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default of each parameter."""
        return MappingProxyType({name: each.default for name, each in self.parameters.items()})


# filled by the decorator, so that a loss is one file: a table here would be the second place to
# change
_DECLARED: Final[dict[str, DeclaredLoss]] = {}


def declare_loss(name: str, **needs: Any) -> Callable[[LossFunction], LossFunction]:
    """Declare the decorated function as the loss `name`.

    Args:
        name: name of the loss in configurations.
        needs: fields of `DeclaredLoss` that differ from their defaults.

    Raises: TypeError for an argument without a default or without a `Parameter`; ValueError for a
        name that is taken.
    """

    def declare(function: LossFunction) -> LossFunction:
        # the second one would win by the order of imports, which nobody chose
        if name in _DECLARED:
            raise ValueError(f"policy loss {name!r} is declared twice; rename one")
        _DECLARED[name] = DeclaredLoss(name, function, _read_parameters(function), **needs)
        return function

    return declare


def declared_losses() -> Mapping[str, DeclaredLoss]:
    """Return all declared losses: the default first, the others by name."""
    names = sorted(_DECLARED, key=lambda name: (name != "ppo", name))
    return MappingProxyType({name: _DECLARED[name] for name in names})


def _read_parameters(function: Callable[..., Any]) -> Mapping[str, DeclaredParameter]:
    # options, ranges and help are read off the signature: written twice, the help of a parameter
    # would soon be that of an older default
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, argument in inspect.signature(function).parameters.items():
        # the batch is positional; everything that a user may set has to be named where it is set
        if argument.kind is not argument.KEYWORD_ONLY:
            continue
        extras = getattr(hints[name], "__metadata__", ())
        annotations = [extra for extra in extras if isinstance(extra, Parameter)]
        if argument.default is argument.empty or not annotations:
            raise TypeError(
                f"{function.__qualname__}: {name} needs a default and Annotated[..., Parameter(...)]"
            )
        found[name] = DeclaredParameter(annotations[0], get_args(hints[name])[0], argument.default)
    return MappingProxyType(found)


PolicyLoss: TypeAlias = Callable[[TokenBatch], tuple[Tensor, Diagnostics]]
"""Function that returns losses float [B, T], exact zeros where masked, and diagnostics that add up
over micro-batches."""
