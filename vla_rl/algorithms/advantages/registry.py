"""Advantage estimators by the name that a config uses."""

import inspect
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from vla_rl.algorithms.advantages.config import AdvantageConfig
from vla_rl.algorithms.advantages.gae import gae, marft_gae
from vla_rl.algorithms.advantages.group_baselines import dr_grpo, grpo, max_rl, pass_at_k, rloo
from vla_rl.algorithms.advantages.other_baselines import cpgd_filter, gpg, opo, remax
from vla_rl.algorithms.advantages.returns import reinforce_plus_plus, reinforce_plus_plus_baseline
from vla_rl.algorithms.advantages.reward_batch import AdvantageEstimator, Advantages
from vla_rl.algorithms.choices import chosen, is_function_path, load_function
from vla_rl.errors import ConfigError

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
    }
)
"""Estimators by name. Their keyword arguments are `ADVANTAGE_PARAMETERS[name]`."""


def advantage_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that a config describes, to be called with a `RewardBatch`.

    Raises: ConfigError for a name that is neither known nor a function, or a parameter that a
    custom function lacks.
    """
    if not is_function_path(config.name):
        return partial(chosen(ADVANTAGES, config.name, "advantage"), **config.parameters)
    function: Any = load_function(config.name, "advantage")
    unknown = sorted(config.chosen.keys() - inspect.signature(function).parameters.keys())
    if unknown:
        raise ConfigError(
            f"advantage {config.name!r} has no keyword argument {unknown[0]!r}; "
            "leave the field out."
        )
    own: AdvantageEstimator = partial(function, **config.chosen)
    return own
