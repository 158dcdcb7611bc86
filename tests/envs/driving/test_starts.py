"""The options of a reset choose the scene."""

from typing import Any

import numpy as np
import pytest

from vla_rl.envs.driving.world import NUM_SCENES, choose_scene


def test_the_options_name_the_scene_or_it_is_drawn() -> None:
    assert choose_scene({"init_state_id": NUM_SCENES - 1}, np.random.default_rng(0)) == (
        NUM_SCENES - 1
    )
    first, second = (choose_scene(None, np.random.default_rng(seed)) for seed in (0, 1))
    assert first != second
    assert first == choose_scene({}, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_state_id": NUM_SCENES}, f"init_state_id is {NUM_SCENES}, expected 0 to"),
        ({"init_state_id": -1}, "init_state_id is -1"),
        ({"scene": 3}, r"reset options \['scene'\] are unknown, expected only 'init_state_id'"),
    ],
)
def test_another_number_or_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose_scene(options, np.random.default_rng(0))
