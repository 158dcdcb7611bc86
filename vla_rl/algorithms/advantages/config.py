"""Advantage estimators by the name that a configuration uses, with their parameters."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from vla_rl.algorithms.advantages.baselines import (
    cpgd_filter,
    dr_grpo,
    gpg,
    grpo,
    max_rl,
    opo,
    pass_at_k,
    rloo,
)
from vla_rl.algorithms.advantages.hierarchical import hierarchical_rloo
from vla_rl.algorithms.advantages.returns import (
    gae,
    marft_gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from vla_rl.algorithms.advantages.reward_batch import AdvantageEstimator, Advantages
from vla_rl.errors import ConfigError
from vla_rl.types import Config, Share
from vla_rl.util.imports import check_choice, choose, is_function_path, load_function

ADVANTAGE_PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "grpo": {},
        "dr_grpo": {},
        "max_rl": {},
        "rloo": {},
        "pass_at_k": {"normalise_std": True},
        "gpg": {},
        "cpgd_filter": {"max_weight": 3.0},
        "opo": {},
        "remax": {},
        "reinforce_plus_plus": {"gamma": 1.0},
        "reinforce_plus_plus_baseline": {},
        "gae": {"gamma": 0.99, "lam": 0.95, "whiten": True, "bootstrap": True},
        "marft_gae": {"gamma": 0.99, "lam": 0.95, "whiten": True, "bootstrap": True},
        "hierarchical_rloo": {"gamma": 1.0, "lam": 0.0},
    }
)
"""The parameters of each estimator, with their defaults."""


class AdvantageConfig(Config, frozen=True, kw_only=True):
    """An advantage estimator by name, with its parameters.

    A parameter left at none takes that estimator's own default.
    """

    name: str = "grpo"
    """Name of the estimator: grpo, dr_grpo, max_rl, rloo, pass_at_k, gpg, cpgd_filter, opo, remax,
    reinforce_plus_plus, reinforce_plus_plus_baseline, gae, marft_gae, hierarchical_rloo, or your own
    function as `module:function`."""

    gamma: Share | None = None
    """Discount factor, per control step if the batch has the durations of its steps, else
    per step; hierarchical_rloo: per turn."""

    lam: Share | None = None
    """GAE's decay of later errors; 1 gives the discounted return minus the value. Lower
    it for less variance and more bias. hierarchical_rloo: weight of what was earned after a call."""

    whiten: bool | None = None
    """gae, marft_gae: scale the advantages of the batch to mean 0 and standard deviation 1."""

    bootstrap: bool | None = None
    """gae, marft_gae: an episode that a limit cut off continues with the critic's value of its last
    observation. False: nothing follows, so that an episode without success counts as a failure. Take False
    if the task is to succeed within the limit, as in LIBERO."""

    normalise_std: bool | None = None
    """pass_at_k: divide by the group's standard deviation."""

    max_weight: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """cpgd_filter: largest factor that compensates for groups whose rewards are all equal."""

    def __post_init__(self) -> None:
        if not is_function_path(self.name):
            check_choice(ADVANTAGE_PARAMETERS, self.name, "AdvantageConfig.name")
            unknown = sorted(self.chosen.keys() - ADVANTAGE_PARAMETERS[self.name].keys())
            if unknown:
                has = ", ".join(ADVANTAGE_PARAMETERS[self.name]) or "no parameters"
                raise ConfigError(
                    f"advantage {self.name!r} has no {unknown[0]}; it has: {has}. "
                    "Leave the field out."
                )

    @property
    def chosen(self) -> dict[str, Any]:
        """The parameters that were set."""
        values = {
            field: getattr(self, field) for field in self.__struct_fields__ if field != "name"
        }
        return {field: value for field, value in values.items() if value is not None}

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter of the estimator, as set or by default.

        A custom estimator has only those that were set.
        """
        return {**ADVANTAGE_PARAMETERS.get(self.name, {}), **self.chosen}

    def unused_options(self) -> Mapping[str, str]:
        """Return the parameters of other estimators; a custom one may read all."""
        if is_function_path(self.name):
            return {}
        # one class with the fields of all estimators, because a command line has to know its
        # options before it knows the name; options of others are reported instead of ignored
        fields = (field for field in self.__struct_fields__ if field != "name")
        others = [field for field in fields if field not in self.parameters]
        return dict.fromkeys(others, f"it is for other advantages than {self.name!r}")

    @property
    def needs_group(self) -> bool:
        """Whether a group of one has no signal, because trajectories are compared within groups.

        False for a custom estimator, because it cannot be determined.
        """
        return not (
            self.needs_values
            or self.name in ("remax", "reinforce_plus_plus")
            or is_function_path(self.name)
        )

    @property
    def compares_turns(self) -> bool:
        """Whether the estimator reads the decisions of all agents of an episode in one row."""
        return self.name == "hierarchical_rloo"

    @property
    def needs_values(self) -> bool:
        """Whether the estimator needs a critic's values."""
        return self.name in ("gae", "marft_gae")


ADVANTAGES: Final = MappingProxyType[str, Callable[..., Advantages]](
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "max_rl": max_rl,
        "rloo": rloo,
        "pass_at_k": pass_at_k,
        "gpg": gpg,
        "cpgd_filter": cpgd_filter,
        "opo": opo,
        "remax": remax,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
        "gae": gae,
        "marft_gae": marft_gae,
        "hierarchical_rloo": hierarchical_rloo,
    }
)
"""Estimators by name. Their keyword arguments are `ADVANTAGE_PARAMETERS[name]`."""


def advantage_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that a config describes, to be called with a `RewardBatch`.

    Raises: ConfigError for a name that is neither known nor a function, or a parameter that a
    custom function lacks.
    """
    if not is_function_path(config.name):
        return partial(choose(ADVANTAGES, config.name, "advantage"), **config.parameters)
    function: Any = load_function(config.name, "advantage")
    unknown = sorted(config.chosen.keys() - inspect.signature(function).parameters.keys())
    if unknown:
        raise ConfigError(
            f"advantage {config.name!r} has no keyword argument {unknown[0]!r}; "
            "leave the field out."
        )
    # only what was set: a function of one's own has defaults that this table does not know
    own: AdvantageEstimator = partial(function, **config.chosen)
    return own
