"""Which policy loss, and its numbers: imports in an instant, without torch.

Every loss has its own few parameters; a field left at None takes that loss' own default (`PARAMETERS`), and a field that
the chosen loss does not have is refused, so that no setting is silently without effect.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from vla_rl.algorithms.choices import check_choice, is_function_path
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig
from vla_rl.errors import ConfigError
from vla_rl.types import Config

RatioLevel: TypeAlias = Literal["token", "action", "chunk", "sequence"]
"""Whose probability ratio is clipped: one token's, that of all tokens of one control step, of one row (an action chunk),
or the length-normalised one of the whole sequence."""

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
"""Losses that follow data of older weights however far the policy has moved away from them."""


class PolicyLossConfig(Config, frozen=True, kw_only=True):
    """A policy loss by name, with its numbers; a number left at none takes that loss' own default."""

    name: str = "ppo"
    """ppo, decoupled_ppo, gspo, gmpo, cispo, sapo, cpgd, gpg, clip_cov, kl_cov, dppo, ipo, icepop, opsm, m2po, or your own
    as `module:function`."""

    level: RatioLevel | None = None
    """Whose probability ratio is clipped: token, action (one control step), chunk, or sequence (length-normalised)."""

    clip_low: float | None = None
    """The ratio is clipped below 1 minus this; gmpo bounds the log-ratio by it."""

    clip_high: float | None = None
    """The ratio is clipped above 1 plus this; gmpo bounds the log-ratio by it."""

    dual_clip: float | None = None
    """Bound on the loss of tokens with a negative advantage and a large ratio, above 1; none leaves it out."""

    behavior_weight_cap: float | None = None
    """decoupled_ppo: drop what has a larger weight proximal / behavior: a token, or at the levels action and chunk the whole
    control step or chunk."""

    temperature_positive: float | None = None
    """sapo: steepness of the soft gate where the advantage is positive."""

    temperature_negative: float | None = None
    """sapo: steepness of the soft gate where the advantage is negative or 0."""

    drift_coef: float | None = None
    """cpgd: weight of the policy drift."""

    covariance_share: float | None = None
    """clip_cov, kl_cov: share of the tokens that is clipped or penalised."""

    covariance_low: float | None = None
    """clip_cov: tokens with a covariance above this may be clipped."""

    covariance_high: float | None = None
    """clip_cov: tokens with a covariance below this may be clipped."""

    penalty_coef: float | None = None
    """kl_cov: weight of |log-ratio| on the chosen tokens; dppo, ipo: weight of the squared log-ratio on all tokens."""

    probability_low: float | None = None
    """dppo, ipo: drop a token if its probability fell by more than this; 1 keeps all."""

    probability_high: float | None = None
    """dppo, ipo: drop a token if its probability rose by more than this; 1 keeps all."""

    weight_low: float | None = None
    """icepop: tokens with a smaller ratio are dropped."""

    weight_high: float | None = None
    """icepop: tokens with a larger ratio are dropped."""

    max_sequence_kl: float | None = None
    """opsm: drop a sequence with a negative advantage if the sampler's log-prob minus the current one, averaged over its
    tokens, is above this many nats. TRL suggests 0.5."""

    max_second_moment: float | None = None
    """m2po: tokens are dropped, the farthest first, until the mean squared log-ratio is at most this."""

    allow_unbounded: bool = False
    """Accept a loss without a trust region although generation runs ahead of the learner."""

    kl: KlLossConfig = KlLossConfig()
    correction: CorrectionConfig = CorrectionConfig()

    def __post_init__(self) -> None:
        if not is_function_path(self.name):
            check_choice(PARAMETERS, self.name, "PolicyLossConfig.name")
            unknown = sorted(self.chosen.keys() - PARAMETERS[self.name].keys())
            if unknown:
                has = ", ".join(PARAMETERS[self.name]) or "no parameters"
                raise ConfigError(f"policy loss {self.name!r} has no {unknown[0]}; it has: {has}. Leave the field out.")
        if self.correction.is_active and self.name == "decoupled_ppo":
            raise ConfigError(
                "PolicyLossConfig.correction is active with decoupled_ppo, expected one of them: both weigh by proximal / "
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
        """Every parameter of the loss, set or by default; of one's own loss those that were set."""
        return {**PARAMETERS.get(self.name, {}), **self.chosen}

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss needs the trainer's own log-probs before the update."""
        return self.name == "decoupled_ppo" or self.correction.is_active

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the reference policy's log-probs."""
        return self.kl.coef > 0.0

    @property
    def has_terms_without_advantage(self) -> bool:
        """Whether the loss may have a gradient where every advantage is 0; of your own loss nobody knows, so True."""
        values = self.parameters
        drifts = bool(values.get("drift_coef") or values.get("penalty_coef"))
        return self.needs_reference or drifts or is_function_path(self.name)

    @property
    def needs_sequence_log_ratio(self) -> bool:
        """Whether a row that is only a part of its sequence needs `TokenBatch.sequence_log_ratio`."""
        return self.name in ("gspo", "gmpo") or self.level == "sequence"

    @property
    def needs_sequence_drift(self) -> bool:
        """Whether a row that is only a part of its sequence needs `TokenBatch.sequence_drift`."""
        return self.name == "opsm"

    @property
    def needs_chosen_tokens(self) -> bool:
        """Whether a micro-batch that is only a part of a mini-batch needs `TokenBatch.chosen_tokens`."""
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
                raise ConfigError(f"{low} = {values[low]} and {high} = {values[high]}, expected {low} <= {high}.")
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
    """The loss of a run whose generation may be `max_staleness` updates ahead: the one configured, if it is safe there.

    The default, `ppo`, has a trust region at every staleness. A loss without one is refused as soon as it would see data of
    older weights: where `max_staleness` is above 0, or an update has several optimizer steps, of which only the first has
    the weights that acted; unless `allow_unbounded` is set. Your own loss (`module:function`) is taken as it is.

    Raises: ConfigError for a loss without a trust region.
    """
    if config.name not in WITHOUT_TRUST_REGION or config.allow_unbounded:
        return config
    if max_staleness > 0:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one where max_staleness = {max_staleness} > 0: "
            "choose ppo or decoupled_ppo, set max_staleness=0, or insist with allow_unbounded=True."
        )
    if not steps_once_per_update:
        raise ConfigError(
            f"policy loss {config.name!r} has no trust region, expected one where an update has several optimizer steps: "
            "choose ppo or decoupled_ppo, leave out epochs and minibatch_trajectories, or insist with allow_unbounded=True."
        )
    return config
