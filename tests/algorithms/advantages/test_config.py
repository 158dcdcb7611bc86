"""Check which estimator a configuration means, and which configurations are refused."""

import pytest
from reward_batches import OF_GROUPS

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.advantages import ADVANTAGES
from vla_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "gropo"}, r"AdvantageConfig.name 'gropo' is unknown; did you mean 'grpo'\?"),
        ({"name": "grpo", "lam": 0.9}, "advantage 'grpo' has no lam; it has: no parameters"),
        ({"name": "gae", "gamma": 1.1}, r"gamma is 1.1, expected in \[0, 1\]"),
        ({"name": "gae", "lam": -0.1}, r"lam is -0.1"),
        ({"name": "cpgd_filter", "max_weight": 0.5}, r"max_weight is 0.5, expected at least 1"),
    ],
)
def test_a_config_that_means_nothing_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        AdvantageConfig(**fields)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_whether_an_estimator_needs_groups_or_values_is_known_from_its_config(name) -> None:
    config = AdvantageConfig(name=name)
    assert config.needs_group == (name in OF_GROUPS)
    assert config.needs_values == (name in ("gae", "marft_gae"))
