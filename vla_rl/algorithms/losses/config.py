"""Configuration of losses: a policy loss by name with its parameters, and the terms beside it.

Importing it does not import torch.

The parameters are those of the configurations in the files of `policy`. A field left at None takes
the default of the chosen loss; a field that it does not have is rejected, so that no setting is
silently ignored.
"""

import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, get_type_hints

import msgspec

from vla_rl.algorithms.losses.declaration import DeclaredLoss
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.token_batch import Predicted
from vla_rl.errors import ConfigError
from vla_rl.types import FINITE, Config, PositiveFloat, ReadIf, Share
from vla_rl.util.imports import check_choice, is_function_path


class KlLossConfig(Config, frozen=True, kw_only=True):
    """Penalty on the distance from the reference policy, added to the policy loss."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("estimator",), "coef"),)

    coef: Annotated[float, msgspec.Meta(ge=0, le=FINITE)] = 0.0
    """Weight of the penalty; 0 turns it off, and the reference policy is not computed."""

    estimator: Literal["k1", "abs", "k2", "k3", "k3_plus", "importance_weighted_k3", "exact"] = (
        "k3_plus"
    )
    """Estimator of the KL divergence: k1, abs, k2, k3, k3_plus (value of k3, gradient of k2),
    importance_weighted_k3 for samples of older weights, or exact, for flow policies: computed from the means of
    both policies in the decision's stochastic step."""

    @property
    def is_exact(self) -> bool:
        """Whether the reference's predictions are needed instead of its log-probs."""
        return self.coef > 0.0 and self.estimator == "exact"


class ValueLossConfig(Config, frozen=True, kw_only=True):
    """Settings of the critic's loss."""

    clip: PositiveFloat | None = 0.5
    """Maximum change of a value from its old one before the loss is clipped; none turns clipping
    off."""

    huber_delta: PositiveFloat | None = None
    """Errors above this count linearly instead of squared (Huber loss); none squares every
    error."""


class CorrectionConfig(Config, frozen=True, kw_only=True):
    """Correction of the difference between the engine's and the trainer's log-probs.

    kappa = exp(proximal_log_prob - behavior_log_prob), the trainer's view of the acting weights
    against the engine's.
    """

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("truncate_at",), "truncate"),
        ReadIf(("mask_low", "mask_high"), "mask"),
    )

    truncate: Literal["none", "token", "sequence"] = "none"
    """Weigh losses by min(kappa, truncate_at); kappa is taken for each token, or as the product
    over its sequence. none does not weigh."""

    truncate_at: PositiveFloat = 2.0
    """Largest weight of `truncate`."""

    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Drop what has a kappa outside the bounds: single tokens (`token`), or whole sequences by the
    product (`sequence`) or the geometric mean (`geometric`) of their tokens' kappas. none drops
    nothing."""

    mask_low: Share | None = None
    """Lower bound of `mask`; none takes 0.5, or 0.99 for `geometric`."""

    mask_high: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Upper bound of `mask`; none takes 2.0, or 1.01 for `geometric`."""

    veto_below: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Drop every sequence that has a token with a kappa below this; 0 turns it off.
    Others use 1e-4."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Interval of kappa that `mask` keeps."""
        # a geometric mean over hundreds of tokens hardly leaves 1, so that bounds of single tokens
        # would never drop anything
        low, high = (0.99, 1.01) if self.mask == "geometric" else (0.5, 2.0)
        return (
            low if self.mask_low is None else self.mask_low,
            high if self.mask_high is None else self.mask_high,
        )

    @property
    def is_active(self) -> bool:
        """Whether the correction does anything."""
        return self.truncate != "none" or self.mask != "none" or self.veto_below > 0.0


PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {name: loss.defaults for name, loss in LOSSES.items()}
)
"""The parameters of each loss, with its defaults."""


class PolicyLossSettings(Config, frozen=True, kw_only=True):
    """Fields of `PolicyLossConfig` that are not parameters of a loss."""

    FIELD_DOCS: ClassVar[Mapping[str, str]] = {}
    """Help of the fields that no class body contains."""

    PARTS: ClassVar[Mapping[str, type[Config]]] = {}
    """The configurations whose fields this one has, by the names of the losses."""

    name: str = "ppo"
    """Name of the loss, or your own function as `module:function`."""

    allow_unbounded: bool = False
    """Accept a loss without a trust region even if generation runs ahead of the learner."""

    kl: KlLossConfig = KlLossConfig()
    correction: CorrectionConfig = CorrectionConfig()

    def __post_init__(self) -> None:
        if not is_function_path(self.name):
            check_choice(LOSSES, self.name, "PolicyLossConfig.name")
            known = LOSSES[self.name].config.__struct_fields__
            unknown = sorted(self.chosen.keys() - set(known))
            if unknown:
                has = ", ".join(known) or "no parameters"
                raise ConfigError(
                    f"policy loss {self.name!r} has no {unknown[0]}; it has: {has}. "
                    "Leave the field out."
                )
        # both factors are proximal / behavior: with both on, a stale token would count by the
        # square of its ratio
        if self.correction.is_active and self._needs("needs_proximal"):
            raise ConfigError(
                f"PolicyLossConfig.correction is active with {self.name}, expected one of them: "
                "both weigh by proximal / behavior, which would count it twice. Use name='ppo' "
                "with the correction."
            )
        if self.declared is not None:
            self.declared.config(**self.chosen)  # refuses values out of range
        # the divergence is of the distributions of the next state; of the actions there are none
        if self.kl.is_exact and self.predicted != "next_state":
            raise ConfigError(
                f"kl.estimator is 'exact' and predicts {self.predicted!r}, expected next_state: the exact "
                "divergence is that of the decision's stochastic step. Set kl.coef to 0, or predicts to "
                "next_state."
            )

    @classmethod
    def from_parameters(cls, parameters: Config, **settings: Any) -> Self:
        """Return the loss whose parameters these are.

        Args:
            parameters: such as `PpoLossConfig(clip_low=0.1)`.
            settings: `kl`, `correction` and `allow_unbounded`.
        """
        (name,) = (loss.name for loss in LOSSES.values() if loss.config is type(parameters))
        return cls(name=name, **msgspec.structs.asdict(parameters), **settings)

    @property
    def declared(self) -> DeclaredLoss | None:
        """Declaration of the loss; None for your own function."""
        return LOSSES.get(self.name)

    @property
    def chosen(self) -> dict[str, Any]:
        """The parameters that were set."""
        fixed = PolicyLossSettings.__struct_fields__
        values = {
            field: getattr(self, field) for field in self.__struct_fields__ if field not in fixed
        }
        return {field: value for field, value in values.items() if value is not None}

    @property
    def parameters(self) -> Any:
        """The configuration of a loss of the package, as set or by default."""
        return LOSSES[self.name].config(**self.chosen)

    def unused_options(self) -> Mapping[str, str]:
        """Return the parameters of other losses; a custom loss may read all."""
        if self.declared is None:
            return {}
        read = {*PolicyLossSettings.__struct_fields__, *self.declared.config.__struct_fields__}
        others = {field for field in self.__struct_fields__ if field not in read}
        if self.declared.has_trust_region:
            others.add("allow_unbounded")
        return dict.fromkeys(sorted(others), f"it is for other losses than {self.name!r}")

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss needs the learner's own log-probs from before the update."""
        return self._needs("needs_proximal") or self.correction.is_active

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference policy's log-probs, or its predictions."""
        return self.kl.coef > 0.0

    @property
    def needs_predictions(self) -> bool:
        """Whether the loss needs a flow policy's predictions."""
        return self._needs("needs_predictions") or self.kl.is_exact

    @property
    def predicted(self) -> Predicted:
        """Target of the predictions."""
        is_own = self._needs("needs_predictions")
        predicts: Predicted = self.parameters.predicts if is_own else "next_state"
        return predicts

    @property
    def has_terms_without_advantage(self) -> bool:
        """Whether the loss may have a gradient if every advantage is 0.

        True for a custom loss, because it cannot be determined.
        """
        if self.declared is None:
            return True
        # a group without signal is dropped only if nothing else of the loss would learn from it
        terms, parameters = self.declared.terms_without_advantage, self.parameters
        return self.needs_reference or any(getattr(parameters, term) for term in terms)

    @property
    def needs_sequence_log_ratio(self) -> bool:
        """Whether a row that is only part of its sequence needs `TokenBatch.sequence_log_ratio`."""
        return self._needs("is_of_sequences") or self.chosen.get("level") == "sequence"

    @property
    def needs_sequence_drift(self) -> bool:
        """Whether a row that is only part of its sequence needs `TokenBatch.sequence_drift`."""
        return self._needs("needs_sequence_drift")

    @property
    def needs_chosen_tokens(self) -> bool:
        """Whether a part of a mini-batch needs `TokenBatch.chosen_tokens`."""
        return self._needs("choose_tokens")

    def _needs(self, need: str) -> bool:
        return self.declared is not None and bool(getattr(self.declared, need))


def _class_with_parameters() -> type[PolicyLossSettings]:
    """Return `PolicyLossConfig`, a field for each parameter of any loss."""
    # without ranges, which differ: the configuration of the chosen loss has them
    hints = {
        name: hint
        for loss in LOSSES.values()
        for name, hint in get_type_hints(loss.config).items()
        if name in loss.config.__struct_fields__
    }
    names = f"Name of the loss: {', '.join(LOSSES)}, or your own function as `module:function`."
    content = {
        "__doc__": "A policy loss by name, with its parameters.\n\n"
        "A parameter left at none takes that loss' own default.",
        "__module__": __name__,
        "__annotations__": {name: hint | None for name, hint in hints.items()},
        "FIELD_DOCS": MappingProxyType({"name": names}),
        "PARTS": MappingProxyType({name: loss.config for name, loss in LOSSES.items()}),
        **dict.fromkeys(hints),
    }
    return types.new_class(
        "PolicyLossConfig",
        (PolicyLossSettings,),
        {"frozen": True, "kw_only": True},
        lambda namespace: namespace.update(content),
    )


if TYPE_CHECKING:

    class PolicyLossConfig(PolicyLossSettings, frozen=True, kw_only=True):
        """A policy loss by name, with the parameters that the losses declare."""

        def __init__(
            self,
            *,
            name: str = "ppo",
            allow_unbounded: bool = False,
            kl: KlLossConfig = ...,
            correction: CorrectionConfig = ...,
            **parameters: float | str | None,
        ) -> None: ...

        def __getattr__(self, parameter: str) -> Any: ...

else:
    # the losses declare their parameters in their own files; listing them here again would make a
    # new loss a change of two files
    PolicyLossConfig = _class_with_parameters()


def safe_policy_loss(
    config: PolicyLossConfig, max_staleness: int, *, steps_once_per_update: bool = True
) -> PolicyLossConfig:
    """Return the configured loss if it is safe at this staleness.

    Generation may be `max_staleness` updates ahead of the learner.

    The default, `ppo`, has a trust region at every staleness. A loss without one is rejected if it
    would see data of older weights: if `max_staleness` is above 0, or if an update has several
    optimizer steps, because only the first step has the weights that acted. `allow_unbounded`
    accepts it. Your own loss (`module:function`) is always accepted.

    Raises: ConfigError for a loss without a trust region.
    """
    if config.declared is None or config.declared.has_trust_region or config.allow_unbounded:
        return config
    # without a bound, one token of older weights with a ratio of 50 outweighs all others of an
    # update
    if max_staleness > 0:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one if max_staleness = "
            f"{max_staleness} > 0: choose ppo or decoupled_ppo, set max_staleness=0, or set "
            "allow_unbounded=True."
        )
    # the second step of an update already has other weights than those that acted, at every
    # staleness
    if not steps_once_per_update:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one if an update has "
            "several optimizer steps: choose ppo or decoupled_ppo, leave out epochs and "
            "minibatch_trajectories, or set allow_unbounded=True."
        )
    return config
