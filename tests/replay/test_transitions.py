"""A trajectory of a steered policy becomes rows, and nothing that does not fit becomes one."""

import msgspec
import numpy as np
import pytest
from episode_rows import FINAL_STATE, LAYOUT, make_trajectory

from vla_rl.errors import DataError
from vla_rl.replay import make_rows
from vla_rl.replay.transitions import discount_returns
from vla_rl.types import StopReason


def test_a_row_holds_what_its_decision_saw_did_and_earned() -> None:
    trajectory = make_trajectory(decisions=3, stop=StopReason.SUCCESS, last=1)
    rows = make_rows(trajectory, LAYOUT).rows
    second = trajectory.steps[1].chunk
    assert rows["features"][1].tolist() == second.drawn["features"].tolist()
    assert rows["proprio"][1].tolist() == second.drawn["proprio"].tolist()
    assert rows["reference"][1].tolist() == second.drawn["reference"].tolist()
    assert rows["action"][1].tolist() == second.tokens.tolist()
    assert rows["num_rewards"].tolist() == [2, 2, 1]
    assert rows["rewards"].tolist() == [[0, 0], [0, 0], [1, 0]]
    assert rows["steps_to_end"].tolist() == [5, 3, 1]
    assert rows["return_to_go"].tolist() == [1, 1, 1]
    assert rows["head_version"].tolist() == [second.weight_version] * 3
    assert rows["decision"].tolist() == [0, 1, 2]
    assert rows["episode"].tolist() == [trajectory.episode.episode_id] * 3
    assert rows["is_success"].all()


def test_the_next_state_is_the_one_of_the_next_decision() -> None:
    rows = make_rows(make_trajectory(decisions=3), LAYOUT).rows
    for key in ("features", "proprio", "reference"):
        assert (rows[f"next_{key}"][:-1] == rows[key][1:]).all()


def test_a_termination_has_no_next_state_and_a_cut_has_the_final_one() -> None:
    ended = make_rows(make_trajectory(stop=StopReason.TERMINATED), LAYOUT, FINAL_STATE).rows
    assert ended["terminated"].tolist() == [False, False, True]
    assert not ended["truncated"].any()
    assert not ended["next_features"][-1].any()
    cut = make_rows(make_trajectory(stop=StopReason.TIME_LIMIT), LAYOUT, FINAL_STATE).rows
    assert cut["truncated"].tolist() == [False, False, True]
    assert not cut["terminated"].any()
    assert cut["next_features"][-1].tolist() == FINAL_STATE["features"].tolist()


def test_a_cut_episode_without_its_final_state_is_refused() -> None:
    with pytest.raises(DataError, match=r"was cut off .* 'features', expected .*describe_states"):
        make_rows(make_trajectory(stop=StopReason.TIME_LIMIT), LAYOUT)


def test_rewards_of_a_run_replace_the_environments_at_the_end_of_each_decision() -> None:
    rewards = np.array([0.25, 0.0, -1.0], np.float32)
    rows = make_rows(make_trajectory(last=1), LAYOUT, rewards=rewards).rows
    assert rows["rewards"].tolist() == [[0, 0.25], [0, 0], [-1, 0]]


def test_a_row_can_be_a_tensor_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float16", "float32"):
        rows = msgspec.structs.replace(LAYOUT, features_dtype=dtype).make_empty_rows(2)
        for name in rows.dtype.names:
            assert torch.from_numpy(rows[name]).shape[0] == 2


def test_returns_are_discounted_by_control_steps_within_each_episode() -> None:
    rows = LAYOUT.make_empty_rows(3)
    rows["rewards"] = [[0, 1], [1, 0], [1, 1]]
    rows["num_rewards"] = [2, 1, 2]
    rows["terminated"] = [False, True, True]
    # by hand at gamma 0.5: 0 + 0.5 + 0.25 * 1; 1; 1 + 0.5
    assert discount_returns(rows, 0.5).tolist() == [0.75, 1.0, 1.5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drawn": None}, "decision 1 recorded nothing, expected 'features'"),
        (
            {"tokens": np.zeros(5, np.float32)},
            r"'action' is float32 of shape \[5\], expected 4 numbers",
        ),
        ({"actions": np.zeros((3, 2), np.float32)}, "a chunk of 3 control steps, expected 2"),
        ({"tokens": np.array([0, np.nan, 0, 0], np.float32)}, "'action' of decision 1 holds NaN"),
        ({"rewards": np.array([np.nan, 0], np.float32)}, "'rewards' of decision 1 holds NaN"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused_with_the_decision(
    change: dict, words: str
) -> None:
    trajectory = make_trajectory()
    step = trajectory.steps[1]
    if "rewards" in change:
        step = msgspec.structs.replace(step, **change)
    else:
        step = msgspec.structs.replace(step, chunk=msgspec.structs.replace(step.chunk, **change))
    steps = (trajectory.steps[0], step, trajectory.steps[2])
    with pytest.raises(DataError, match=words):
        make_rows(msgspec.structs.replace(trajectory, steps=steps), LAYOUT)


def test_features_beyond_float16_are_refused() -> None:
    layout = msgspec.structs.replace(LAYOUT, features_dtype="float16")
    trajectory = make_trajectory()
    trajectory.steps[2].chunk.drawn["features"][0] = 70_000.0
    with pytest.raises(DataError, match=r"'features' of decision 2 .* store features as float32"):
        make_rows(trajectory, layout)
