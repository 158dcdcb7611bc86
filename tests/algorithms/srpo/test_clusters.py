"""References: several ways to succeed, the radius from the data, and what the released settings
make of them.
"""

import numpy as np
import pytest

from vla_rl.algorithms.srpo.rules import cluster_centres, released_centres


def centres(points, clusters="k_distance", radius_scale=1.5):
    return cluster_centres(np.array(points, dtype=float), clusters, radius_scale).tolist()


def test_the_radius_follows_the_scale_of_the_data() -> None:
    modes = np.array([[0.0], [1.0], [100.0], [101.0]])
    # nearest neighbours are all 1 apart, so the radius is 1.5: two clusters
    assert sorted(centres(modes)) == [[0.5], [100.5]]
    np.testing.assert_allclose(sorted(centres(modes * 1e-6)), [[0.5e-6], [100.5e-6]])
    assert centres(modes, radius_scale=100.0) == [[50.5]]


def test_the_radius_is_the_median_of_the_nearest_distances_and_not_their_mean_or_least() -> None:
    # nearest distances 1, 1, 1.4, 1.4, 50: median 1.4, mean 10.96, least 1
    points = [[0.0], [1.0], [10.0], [11.4], [61.4]]
    assert centres(points, radius_scale=1.01) == [[0.5], [10.7], [61.4]]
    # 0 and 1 are neighbours only within the radius; a scale of 7 makes it 9.8, which joins 1 and 10
    assert centres(points, radius_scale=7.0) == [[5.6], [61.4]]
    # of an even number the median lies between the middle two: nearest distances 1, 1, 3, 3 give 2
    assert centres([[0.0], [1.0], [10.0], [13.0]], radius_scale=1.4) == [[0.5], [10.0], [13.0]]
    assert centres([[0.0], [1.0], [10.0], [13.0]], radius_scale=1.6) == [[0.5], [11.5]]


def test_a_lone_success_is_a_reference_of_its_own() -> None:
    # nearest distances 1, 1, 49: the median 1 gives radius 1.5, so 50 belongs to no cluster
    assert centres([[0.0], [1.0], [50.0]]) == [[0.5], [50.0]]
    assert centres([[3.0]]) == [[3.0]]


@pytest.mark.parametrize("clusters", ["k_distance", "hdbscan"])
def test_identical_successes_are_one_reference(clusters) -> None:
    assert centres([[2.0, 1.0]] * 3, clusters) == [[2.0, 1.0]]
    assert released_centres(np.array([[2.0, 1.0]] * 3)).tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize("clusters", ["k_distance", "hdbscan"])
def test_two_modes_of_many_successes_are_two_references(clusters) -> None:
    rng = np.random.default_rng(0)
    modes = np.concatenate([rng.normal(0.0, 1.0, (20, 2)), rng.normal(50.0, 1.0, (20, 2))])
    found = np.array(sorted(centres(modes, clusters, radius_scale=4.0)))
    for mode in (0.0, 50.0):
        near = found[np.abs(found - mode).max(axis=1) < 5.0]
        assert len(near)
    assert not ((found > 10.0) & (found < 40.0)).any()


@pytest.mark.parametrize("num", [2, 3])
def test_a_handful_of_successes_suffices_for_hdbscan(num) -> None:
    found = np.array(centres([[float(k)] for k in range(num)], "hdbscan"))
    assert 1 <= len(found) <= num


def test_released_clusters_form_only_for_near_duplicates() -> None:
    # standardised, 0 and 0.1 lie within 0.5 of each other, and so do 10 and 10.1
    found = released_centres(np.array([[0.0], [0.1], [10.0], [10.1]]))
    np.testing.assert_allclose(np.sort(found[:, 0]), [0.05, 10.05])
    many_dimensions = np.random.default_rng(0).normal(size=(8, 1408))
    np.testing.assert_allclose(
        released_centres(many_dimensions), many_dimensions.mean(axis=0, keepdims=True)
    )
