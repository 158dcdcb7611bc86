"""The distance from the reference as part of the reward, and the weight that adapts; by hand."""

import numpy as np
import pytest

from vla_rl.algorithms import KlRewardConfig, mean_kl, next_kl_coef, penalised_rewards
from vla_rl.errors import ConfigError


def test_each_step_pays_for_its_own_distance() -> None:
    mask = np.array([[True, True, False]])
    rewards, mean = penalised_rewards(
        np.array([[0.0, 1.0, 0.0]]), np.array([[0.5, 0.1, np.nan]]), mask, coef=0.2
    )
    np.testing.assert_allclose(rewards, [[-0.1, 0.98, 0.0]])
    assert mean == pytest.approx(0.3)


def test_nothing_to_pay_for_is_no_error() -> None:
    rewards, mean = penalised_rewards(
        np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4), bool), coef=0.1
    )
    assert rewards.shape == (0, 4)
    assert mean == 0.0
    _, mean = penalised_rewards(
        np.zeros((1, 2)), np.full((1, 2), np.nan), np.zeros((1, 2), bool), coef=0.1
    )
    assert mean == 0.0


def test_a_fixed_weight_stays() -> None:
    assert next_kl_coef(KlRewardConfig(coef=0.001), 0.001, observed_kl=9.0, num_samples=64) == 0.001


def test_the_kl_of_an_update_is_a_mean_over_tokens_or_over_trajectories() -> None:
    # 10 tokens of 0.1 each, 1 token of 0.7, and an episode in which nothing was chosen
    kl, num_tokens = np.array([1.0, 0.7, 0.0]), np.array([10, 1, 0])
    assert mean_kl(kl, num_tokens, "tokens") == pytest.approx(1.7 / 11)
    assert mean_kl(kl, num_tokens, "trajectories") == pytest.approx((0.1 + 0.7) / 2)
    assert (
        mean_kl(kl[2:], num_tokens[2:], "tokens")
        == mean_kl(kl[2:], num_tokens[2:], "trajectories")
        == 0.0
    )


def test_an_adaptive_weight_follows_the_target_by_a_bounded_step() -> None:
    config = KlRewardConfig(coef=0.1, target=0.1, horizon=1000)
    assert next_kl_coef(config, 0.1, observed_kl=0.11, num_samples=100) == pytest.approx(
        0.1 * (1 + 0.1 * 0.1)
    )
    assert next_kl_coef(config, 0.1, observed_kl=9.0, num_samples=100) == pytest.approx(
        0.1 * (1 + 0.2 * 0.1)
    )
    assert next_kl_coef(config, 0.1, observed_kl=0.0, num_samples=100) == pytest.approx(
        0.1 * (1 - 0.2 * 0.1)
    )


def test_an_adaptive_weight_never_falls_to_nothing_however_many_samples_an_update_has() -> None:
    config = KlRewardConfig(coef=0.1, target=0.1, horizon=100)
    # 1 - 0.2 * 512 / 100 is below 0: it halves instead
    fallen = next_kl_coef(config, 0.1, observed_kl=0.0, num_samples=512)
    assert fallen == pytest.approx(0.05)
    assert next_kl_coef(config, fallen, observed_kl=9.0, num_samples=512) > fallen


def test_bad_input_is_refused_by_name() -> None:
    yes = np.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"kl of trajectory 0 at step 1 is nan"):
        penalised_rewards(np.zeros((1, 2)), np.array([[0.0, np.nan]]), yes, coef=0.1)
    with pytest.raises(
        ValueError, match=r"step_rewards is \[1, 3\] and kl \[1, 2\], expected \[1, 2\]"
    ):
        penalised_rewards(np.zeros((1, 3)), np.zeros((1, 2)), yes, coef=0.1)
    with pytest.raises(ConfigError, match=r"coef is 0.0, expected above 0 if a target adapts it"):
        KlRewardConfig(target=0.1)
    with pytest.raises(ConfigError, match="horizon is 0"):
        KlRewardConfig(coef=0.1, target=0.1, horizon=0)
