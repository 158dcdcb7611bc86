"""Declaration of a policy loss: its function, parameters with defaults, and what it needs.

    @declare_loss("cpgd", terms_without_advantage=("drift_coef",))
    def cpgd(
        batch: TokenBatch,
        *,
        clip_low: ClipLow = 0.2,
        drift_coef: Annotated[float, Parameter("Weight of the policy drift.", least=0.0)] = 1e-3,
    ) -> LossResult:

The keyword arguments are the parameters. Each file in `policy` declares one loss; nothing else lists
them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_type_hints

from vla_rl.algorithms.lazy_torch import Tensor
from vla_rl.algorithms.losses.diagnostics import Diagnostics
from vla_rl.algorithms.losses.ratio_levels import RatioLevel

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
        if name in _DECLARED:
            raise ValueError(f"policy loss {name!r} is declared twice; rename one")
        _DECLARED[name] = DeclaredLoss(name, function, _parameters_of(function), **needs)
        return function

    return declare


def declared_losses() -> Mapping[str, DeclaredLoss]:
    """Return all declared losses: the default first, the others by name."""
    names = sorted(_DECLARED, key=lambda name: (name != "ppo", name))
    return MappingProxyType({name: _DECLARED[name] for name in names})


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, DeclaredParameter]:
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, argument in inspect.signature(function).parameters.items():
        if argument.kind is not argument.KEYWORD_ONLY:
            continue
        extras = getattr(hints[name], "__metadata__", ())
        described = [extra for extra in extras if isinstance(extra, Parameter)]
        if argument.default is argument.empty or not described:
            raise TypeError(
                f"{function.__qualname__}: {name} needs a default and Annotated[..., Parameter(...)]"
            )
        found[name] = DeclaredParameter(described[0], get_args(hints[name])[0], argument.default)
    return MappingProxyType(found)
