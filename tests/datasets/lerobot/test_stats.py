"""Statistics of parts of a data set together are those of all its rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from vla_rl.datasets.lerobot.writing import Stats, _compute_pixel_stats, merge_stats, read_stats
from vla_rl.errors import DataError

ROWS = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=1, max_size=8)


def assert_close(found: Stats, expected: Stats) -> None:
    assert found.count == expected.count
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name
        )


def test_statistics_by_hand() -> None:
    found = Stats.from_rows(np.array([[1, 10], [3, 10]], np.int64))
    assert found.min.tolist() == [1.0, 10.0]
    assert found.max.tolist() == [3.0, 10.0]
    assert found.mean.tolist() == [2.0, 10.0]
    assert found.std.tolist() == [1.0, 0.0]
    assert found.count == 2


@given(ROWS, ROWS)
def test_both_parts_together_have_the_statistics_of_all_rows(one: list, other: list) -> None:
    a, b = np.array(one), np.array(other)
    together = Stats.from_rows(a).with_more(Stats.from_rows(b))
    assert_close(together, Stats.from_rows(np.concatenate([a, b])))


def test_plain_values_give_the_statistics_back() -> None:
    stats = Stats.from_rows(np.array([[1.0, 2.0], [5.0, 4.0]]))
    assert_close(Stats.from_values(stats.values(), "here"), stats)


def test_a_feature_of_one_part_alone_keeps_its_statistics() -> None:
    one, other = Stats.from_rows(np.array([[1.0]])), Stats.from_rows(np.array([[3.0]]))
    found = merge_stats({"a": one}, {"a": other, "b": other})
    assert found["a"].mean.tolist() == [2.0]
    assert found["b"] is other


def test_pixels_are_scaled_to_one_and_counted_by_frame() -> None:
    pixels = np.array([[0, 255, 51], [255, 255, 153]], np.uint8)
    found = _compute_pixel_stats(pixels, num_frames=1)
    assert found.mean.shape == (3, 1, 1)
    assert found.mean[:, 0, 0] == pytest.approx([0.5, 1.0, 0.4])
    assert found.std[:, 0, 0] == pytest.approx([0.5, 0.0, 0.2])
    assert found.min[:, 0, 0] == pytest.approx([0.0, 1.0, 0.2])
    assert found.count == 1


def test_statistics_that_another_program_did_not_write_are_missed_by_name(tmp_path: Path) -> None:
    row = {f"stats/action/{kind}": [1.0] for kind in ("min", "max", "mean", "count")}
    with pytest.raises(DataError, match=r"no 'stats/action/std' of episode 4, expected statistics"):
        read_stats({**row, "episode_index": 4}, ["action"], tmp_path)
    found = read_stats({**row, "stats/action/std": [0.5]}, ["action"], tmp_path)
    assert found["action"].std.tolist() == [0.5]
