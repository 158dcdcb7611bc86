"""Configuration of policy losses: a loss by name, with its parameters. Importing it does not import
torch.

Each loss has its own parameters. A field left at None takes the default of that loss
(`PARAMETERS`); a field that the chosen loss does not have is rejected, so that no setting is
silently ignored.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from vla_rl.algorithms.choices import check_choice, is_function_path
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig
from vla_rl.errors import ConfigError
from vla_rl.types import Config

RatioLevel: TypeAlias = Literal["token", "action", "chunk", "sequence"]
"""Unit whose probability ratio is clipped: one token, all tokens of one control step, all tokens of
one row (an action chunk), or the whole sequence, length-normalised."""

_CLIP: Final = {"clip_low": 0.2, "clip_high": 0.28}
_COVARIANCE: Final = {"covariance_share": 2e-4}

PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "ppo": {"level": "token", **_CLIP, "dual_clip": None},
        "decoupled_ppo": {"level": "token", **_CLIP, "dual_clip": None, "behavior_weight_cap": 5.0},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
        "cispo": {"level": "token", "clip_low": 1.0, "clip_high": 4.0},
        "sapo": {"level": "token", "temperature_positive": 1.0, "temperature_negative": 1.05},
        "cpgd": {"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 1e-3},
        "gpg": {},
        "clip_cov": {**_CLIP, **_COVARIANCE, "covariance_low": 1.0, "covariance_high": 5.0},
        "kl_cov": {**_COVARIANCE, "penalty_coef": 1.0},
        "dppo": {"probability_low": 0.2, "probability_high": 0.2, "penalty_coef": 1e-3},
        "ipo": {"probability_low": 0.1, "probability_high": 0.1, "penalty_coef": 1e-3},
        "icepop": {"weight_low": 0.5, "weight_high": 5.0},
        "opsm": {"level": "token", **_CLIP, "dual_clip": None, "max_sequence_kl": 0.1},
        "m2po": {"max_second_moment": 0.04},
    }
)
"""The parameters of each loss, with its defaults."""

WITHOUT_TRUST_REGION: Final = frozenset({"gpg", "kl_cov"})
"""Losses without a trust region: nothing limits how far they move the policy away from the weights
that chose the data."""


class PolicyLossConfig(Config, frozen=True, kw_only=True):
    """A policy loss by name, with its parameters.

    A parameter left at none takes that loss' own default.
    """

    name: str = "ppo"
    """Name of the loss: ppo, decoupled_ppo, gspo, gmpo, cispo, sapo, cpgd, gpg, clip_cov, kl_cov,
    dppo, ipo, icepop, opsm, m2po, or your own function as `module:function`."""

    level: RatioLevel | None = None
    """Unit whose probability ratio is clipped: token, action (one control step), chunk, or sequence
    (length-normalised)."""

    clip_low: float | None = None
    """The ratio is clipped below 1 minus this value. gmpo: lower bound of the log-ratio, as a
    positive number."""

    clip_high: float | None = None
    """The ratio is clipped above 1 plus this value. gmpo: upper bound of the log-ratio."""

    dual_clip: float | None = None
    """Bound, above 1, on the loss of tokens with a negative advantage and a large ratio; none turns
    it off."""

    behavior_weight_cap: float | None = None
    """decoupled_ppo: drop tokens whose weight proximal / behavior is above this; at the levels
    action and chunk, drop the whole control step or chunk."""

    temperature_positive: float | None = None
    """sapo: steepness of the soft gate for tokens with a positive advantage."""

    temperature_negative: float | None = None
    """sapo: steepness of the soft gate for tokens with a negative or zero advantage."""

    drift_coef: float | None = None
    """cpgd: weight of the policy drift."""

    covariance_share: float | None = None
    """clip_cov, kl_cov: share of the tokens that is clipped or penalised, in [0, 1]."""

    covariance_low: float | None = None
    """clip_cov: only tokens with a covariance above this may be clipped."""

    covariance_high: float | None = None
    """clip_cov: only tokens with a covariance below this may be clipped."""

    penalty_coef: float | None = None
    """kl_cov: weight of |log-ratio| on the chosen tokens. dppo, ipo: weight of the squared
    log-ratio on all tokens."""

    probability_low: float | None = None
    """dppo, ipo: drop a token if its probability fell by more than this; 1 keeps every token."""

    probability_high: float | None = None
    """dppo, ipo: drop a token if its probability rose by more than this; 1 keeps every token."""

    weight_low: float | None = None
    """icepop: drop tokens whose ratio is below this."""

    weight_high: float | None = None
    """icepop: drop tokens whose ratio is above this."""

    max_sequence_kl: float | None = None
    """opsm: drop a sequence with a negative advantage if the sampler's log-prob minus the current
    one, averaged over its tokens, exceeds this, in nats. TRL suggests 0.5."""

    max_second_moment: float | None = None
    """m2po: drop tokens, those with the largest |log-ratio| first, until the mean squared log-ratio
    is at most this."""

    allow_unbounded: bool = False
    """Accept a loss without a trust region even if generation runs ahead of the learner."""

    kl: KlLossConfig = KlLossConfig()
    correction: CorrectionConfig = CorrectionConfig()

    def __post_init__(self) -> None:
        if not is_function_path(self.name):
            check_choice(PARAMETERS, self.name, "PolicyLossConfig.name")
            unknown = sorted(self.chosen.keys() - PARAMETERS[self.name].keys())
            if unknown:
                has = ", ".join(PARAMETERS[self.name]) or "no parameters"
                raise ConfigError(
                    f"policy loss {self.name!r} has no {unknown[0]}; it has: {has}. "
                    "Leave the field out."
                )
        if self.correction.is_active and self.name == "decoupled_ppo":
            raise ConfigError(
                "PolicyLossConfig.correction is active with decoupled_ppo, expected one of them: "
                "both weigh by proximal / "
                "behavior, which would count it twice. Use name='ppo' with the correction."
            )
        self._check_ranges()

    @property
    def chosen(self) -> dict[str, Any]:
        """The parameters that were set."""
        values = {field: getattr(self, field) for field in _PARAMETER_FIELDS}
        return {field: value for field, value in values.items() if value is not None}

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter of the loss, as set or by default; for a custom loss only those that were
        set.
        """
        return {**PARAMETERS.get(self.name, {}), **self.chosen}

    def unread(self) -> Mapping[str, str]:
        """Return the parameters of other losses; a custom loss may read all."""
        if is_function_path(self.name):
            return {}
        others = {field for field in _PARAMETER_FIELDS if field not in self.parameters}
        if self.name not in WITHOUT_TRUST_REGION:
            others.add("allow_unbounded")
        return dict.fromkeys(sorted(others), f"it is for other losses than {self.name!r}")

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss needs the learner's own log-probs from before the update."""
        return self.name == "decoupled_ppo" or self.correction.is_active

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference policy's log-probs."""
        return self.kl.coef > 0.0

    @property
    def has_terms_without_advantage(self) -> bool:
        """Whether the loss may have a gradient if every advantage is 0; True for a custom loss,
        because it cannot be determined."""
        values = self.parameters
        drifts = bool(values.get("drift_coef") or values.get("penalty_coef"))
        return self.needs_reference or drifts or is_function_path(self.name)

    @property
    def needs_sequence_log_ratio(self) -> bool:
        """Whether a row that is only part of its sequence needs `TokenBatch.sequence_log_ratio`."""
        return self.name in ("gspo", "gmpo") or self.level == "sequence"

    @property
    def needs_sequence_drift(self) -> bool:
        """Whether a row that is only part of its sequence needs `TokenBatch.sequence_drift`."""
        return self.name == "opsm"

    @property
    def needs_chosen_tokens(self) -> bool:
        """Whether a micro-batch that is only part of a mini-batch needs
        `TokenBatch.chosen_tokens`.
        """
        return self.name in ("clip_cov", "kl_cov", "m2po")

    def _check_ranges(self) -> None:
        values = self.parameters
        least_clip = float("inf") if self.name == "gmpo" else 1.0
        clip_low, dual_clip = values.get("clip_low"), values.get("dual_clip")
        self.require(clip_low is None or 0.0 <= clip_low <= least_clip, "clip_low", "in [0, 1]")
        self.require(dual_clip is None or dual_clip > 1.0, "dual_clip", "above 1, or none")
        for field in _NOT_NEGATIVE:
            value = values.get(field)
            self.require(value is None or value >= 0.0, field, "at least 0")
        for field in ("temperature_positive", "temperature_negative", "behavior_weight_cap"):
            value = values.get(field)
            self.require(value is None or value > 0.0, field, "above 0")
        for low, high in (("covariance_low", "covariance_high"), ("weight_low", "weight_high")):
            if low in values and not values[low] <= values[high]:  # NaN neither
                raise ConfigError(
                    f"{low} = {values[low]} and {high} = {values[high]}, expected {low} <= {high}."
                )
        share = values.get("covariance_share")
        self.require(share is None or share <= 1.0, "covariance_share", "a share in [0, 1]")


_PARAMETER_FIELDS: Final = tuple(
    field
    for field in PolicyLossConfig.__struct_fields__
    if field not in ("name", "allow_unbounded", "kl", "correction")
)
_NOT_NEGATIVE: Final = (
    "clip_high",
    "drift_coef",
    "covariance_share",
    "penalty_coef",
    "probability_low",
    "probability_high",
    "weight_low",
    "max_sequence_kl",
    "max_second_moment",
)


def policy_loss_for(
    config: PolicyLossConfig, max_staleness: int, *, steps_once_per_update: bool = True
) -> PolicyLossConfig:
    """Return the configured loss if it is safe in a run whose generation may be `max_staleness`
    updates ahead of the learner.

    The default, `ppo`, has a trust region at every staleness. A loss without one is rejected if it
    would see data of older weights: if `max_staleness` is above 0, or if an update has several
    optimizer steps, because only the first step has the weights that acted. `allow_unbounded`
    accepts it. Your own loss (`module:function`) is always accepted.

    Raises: ConfigError for a loss without a trust region.
    """
    if config.name not in WITHOUT_TRUST_REGION or config.allow_unbounded:
        return config
    if max_staleness > 0:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one if max_staleness = "
            f"{max_staleness} > 0: "
            "choose ppo or decoupled_ppo, set max_staleness=0, or set allow_unbounded=True."
        )
    if not steps_once_per_update:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one if an update has "
            "several optimizer steps: "
            "choose ppo or decoupled_ppo, leave out epochs and minibatch_trajectories, or set "
            "allow_unbounded=True."
        )
    return config
