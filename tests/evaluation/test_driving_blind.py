"""The comparison of kept driving runs with a plan that sees nothing."""

import pytest

from benchmarks.driving_blind import above_blind


def a_line(after: list[float], reward: str = "total") -> dict[str, object]:
    """A kept run, as far as the comparison reads it."""
    return {
        "seed": 3,
        "updates": 60,
        "version": "pdms_v1",
        "reward": reward,
        "after": {"total": after},
    }


def test_runs_are_compared_scene_by_scene() -> None:
    # the scenes differ by 1, the difference from the blind plan is the same in both
    lines = [a_line([1.0, 0.0]), a_line([0.0], "ego_progress"), a_line([1.5, 0.5], "srpo")]
    assert above_blind(lines, [0.75, -0.25, 0.5]) == {
        "seed": [3, 3], "updates": [60, 60], "above_blind": [0.25, 0.75], "above_blind_half": [0.0] * 2
    }  # fmt: skip


def test_a_run_on_more_scenes_than_the_blind_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="2 scenes, expected at most 1; raise --scenes"):
        above_blind([a_line([1.0, 0.0])], [0.5])
