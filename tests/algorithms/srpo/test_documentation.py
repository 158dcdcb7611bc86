"""The examples of docs/srpo.md run as they are written, and the page names every choice."""

from pathlib import Path
from typing import Any

import numpy as np
from made_trajectories import with_frames

from vla_rl.algorithms.srpo.config import CLUSTERINGS, ENCODERS, PRECISIONS, RULES, SHORT_VIDEOS

PAGE = Path(__file__).parents[3] / "docs" / "srpo.md"
BLOCKS = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]


def test_the_rewards_of_the_page_run_as_written() -> None:
    names: dict[str, Any] = {
        "trajectories": [with_frames(6, seed=seed, episode_id=seed) for seed in (0, 1, 0)],
        "is_success": np.array([True, False, False]),
        "tasks": ["a", "a", "a"],
        "update": 0,
    }
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    # the third saw what the first saw, so it retraced everything: alpha
    rewards = names["rewards"].tolist()
    assert rewards[0] == 1.0
    assert rewards[2] == np.float32(0.8)
    assert 0.0 < rewards[1] < 0.8
    assert names["bank"].metrics(1) == {
        "reward/bank_size": 1.0,
        "reward/bank_age_mean": 1.0,
        "reward/bank_age_max": 1.0,
    }


def test_the_configurations_of_the_page_are_accepted() -> None:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], str(PAGE), "exec"), names)
    assert names["as_the_paper"].vjepa2.num_moments == 1
    assert names["in_the_order_of_time"].vjepa2.num_moments == 16


def test_the_page_names_everything_that_can_be_chosen() -> None:
    text = PAGE.read_text()
    for name in (*RULES, *CLUSTERINGS, *ENCODERS, *SHORT_VIDEOS, PRECISIONS[1]):
        assert f"`{name}`" in text or f'"{name}"' in text, name
