"""What the recorder of demonstrations refuses before anything is simulated."""

from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.recipes.record_demonstrations import RecordConfig


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"suite": "libero_90"}, "suite is 'libero_90', expected one of libero_object, libero_spatial"),
        ({"init_state_ids": (50,)}, "expected numbers from 0 to 49, at least one, or none"),
        ({"scene_seeds": ()}, "expected at least one seed"),
        ({"workers": 0}, "workers is 0, expected >= 1 process"),
        ({"num": 0}, "num is 0, expected >= 1 episode"),
        ({"noise": 1.5}, r"noise is 1.5, expected 0 to 1 \(a full command\)"),
        ({"num_init_states": 51}, "num_init_states is 51, expected 1 to 50"),
    ],
)
def test_a_configuration_that_cannot_be_recorded_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordConfig(**changed)
