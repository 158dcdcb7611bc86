"""Every other policy loss against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch
from loss_batches import batch_of, gradient, ratios_of, row

from vla_rl.algorithms.losses import (
    CorrectionConfig,
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
    policy_loss,
    sequence_drift,
    sequence_log_ratio,
)
from vla_rl.algorithms.losses.covariance import token_covariance


def loss_of(name: str, **changes):
    return policy_loss(PolicyLossConfig(name=name, **changes))


def test_gspo_clips_the_geometric_mean_of_the_ratios() -> None:
    # ratios 1.21 and 1.0: geometric mean 1.1, for both tokens
    losses, diagnostics = loss_of("gspo", clip_low=0.2, clip_high=0.28)(
        batch_of((1.21, 1.0), (1.0, -1.0))
    )
    torch.testing.assert_close(losses, row(-1.1, 1.1))
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx(1.1)
    clipped, _ = loss_of("gspo")(batch_of((1.21, 1.0), (1.0, -1.0)))  # default range 3e-4, 4e-4
    torch.testing.assert_close(clipped, row(-1.0004, 1.1))


def test_gspo_takes_the_ratio_of_the_whole_sequence_where_it_spans_rows() -> None:
    loss = loss_of("gspo", clip_low=0.5, clip_high=0.5)
    told = torch.full((1, 1), math.log(1.3), dtype=torch.float64)
    losses, _ = loss(batch_of((1.21, 1.0), (1.0, 1.0), sequence_log_ratio=told))
    torch.testing.assert_close(losses, row(-1.3, -1.3))


def test_gspo_is_ppo_at_the_level_of_the_sequence() -> None:
    batch = batch_of((1.3, 0.9, 1.1), (1.0, -1.0, 2.0))
    numbers = {"clip_low": 0.01, "clip_high": 0.02}
    ppo = loss_of("ppo", level="sequence", **numbers)
    torch.testing.assert_close(loss_of("gspo", **numbers)(batch)[0], ppo(batch)[0])


def test_gmpo_clips_each_ratio_before_the_geometric_mean() -> None:
    # A > 0: log-ratios min(log 2, 0.4) = 0.4 and min(log 0.5, 0.4) = log 0.5
    losses, diagnostics = loss_of("gmpo")(batch_of((2.0, 0.5), (1.0, 1.0)))
    expected = -math.exp((0.4 + math.log(0.5)) / 2)
    torch.testing.assert_close(losses, row(expected, expected))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
    # A < 0: max(log 2, -0.4) = log 2 and max(log 0.5, -0.4) = -0.4
    losses, _ = loss_of("gmpo")(batch_of((2.0, 0.5), (-1.0, -1.0)))
    expected = math.exp((math.log(2.0) - 0.4) / 2)
    torch.testing.assert_close(losses, row(expected, expected))


@pytest.mark.parametrize(("name", "bound"), [("gmpo", 2.0), ("cispo", 6.0), ("cpgd", 2.0)])
def test_the_clip_fraction_counts_the_tokens_that_were_bounded(name: str, bound: float) -> None:
    _, told = loss_of(name)(batch_of((bound, 1.1, 0.9), (1.0, 1.0, 1.0)))
    assert told.metrics()["clip_fraction"] == pytest.approx(1 / 3)


def test_ratios_of_sequences_and_control_steps_are_bounded_however_far_the_policy_went() -> None:
    far = TokenBatch(
        log_prob=row(0.0, 0.0).requires_grad_(),
        behavior_log_prob=row(-15.0, -15.0),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    # a mean of 15 is cut at 10, a product of 30 at 20; what is cut has no gradient
    for config, expected in (
        (PolicyLossConfig(name="gspo"), math.exp(10.0)),
        (PolicyLossConfig(name="gmpo", clip_high=100.0), math.exp(10.0)),
        (PolicyLossConfig(level="chunk"), math.exp(20.0) / 2),
    ):
        torch.testing.assert_close(policy_loss(config)(far)[0], row(expected, expected))
        assert not gradient(policy_loss(config), far).any()


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    batch = batch_of((8.0, 0.1), (1.0, -2.0))
    losses, diagnostics = loss_of("cispo")(batch)
    torch.testing.assert_close(losses, row(-5.0 * math.log(8.0), 0.1 * 2.0 * math.log(0.1)))
    torch.testing.assert_close(gradient(loss_of("cispo"), batch), row(-5.0, 0.2))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)


def test_sapo_is_a_soft_gate_that_is_steeper_for_bad_tokens() -> None:
    losses, _ = loss_of("sapo")(batch_of((2.0, 2.0, 1.0), (1.0, -1.0, 3.0)))
    good = 4.0 / (1.0 + math.exp(-1.0))
    bad = 4.0 / 1.05 / (1.0 + math.exp(-1.05))
    torch.testing.assert_close(losses, row(-good, bad, -3.0 * 2.0))  # sigmoid(0) * 4 / 1 = 2


def test_cpgd_bounds_the_log_ratio_and_weighs_no_gradient() -> None:
    batch = batch_of((2.0, 0.5, 2.0, 0.5), (1.0, 1.0, -1.0, -1.0))
    loss = loss_of("cpgd", drift_coef=0.0)
    bounded = [
        min(math.log(2), math.log(1.2)),
        math.log(0.5),
        -math.log(2),
        -max(math.log(0.5), math.log(0.8)),
    ]
    torch.testing.assert_close(loss(batch)[0], -row(*bounded))
    torch.testing.assert_close(gradient(loss, batch), row(0.0, -1.0, 1.0, 0.0))
    assert loss(batch)[1].metrics()["clip_fraction"] == pytest.approx(0.5)


def test_cpgd_with_a_lower_bound_of_one_has_no_lower_bound() -> None:
    losses, _ = loss_of("cpgd", clip_low=1.0, drift_coef=0.0)(batch_of((0.01,), (-1.0,)))
    torch.testing.assert_close(losses, row(math.log(0.01)))


def test_cpgd_drift_pulls_back_with_the_ratio_minus_one_but_never_harder_than_two() -> None:
    loss = loss_of("cpgd", drift_coef=0.5)
    torch.testing.assert_close(
        gradient(loss, batch_of((2.0, 0.5, 9.0), (0.0, 0.0, 0.0))), row(0.5, -0.25, 1.0)
    )


def test_gpg_is_the_log_prob_times_the_advantage() -> None:
    batch = batch_of((2.0, 0.5), (3.0, -1.0))
    torch.testing.assert_close(loss_of("gpg")(batch)[0], row(-3.0 * math.log(2), math.log(0.5)))
    torch.testing.assert_close(gradient(loss_of("gpg"), batch), row(-3.0, 1.0))


def covariance_batch() -> TokenBatch:
    """Log-probs -3, -1, -1, -3 and advantages -1, 1, -1, 1: covariances 1, 1, -1, -1.

    All ratios are 1.
    """
    log_prob = row(-3.0, -1.0, -1.0, -3.0)
    return TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        behavior_log_prob=log_prob,
        advantage=row(-1.0, 1.0, -1.0, 1.0),
        mask=torch.ones(1, 4, dtype=torch.bool),
    )


def test_clip_cov_drops_a_share_of_the_tokens_of_high_covariance() -> None:
    loss = loss_of("clip_cov", covariance_share=0.25, covariance_low=0.5, covariance_high=5.0)
    losses, diagnostics = loss(covariance_batch())
    # one of the two candidates, the first
    torch.testing.assert_close(losses, row(0.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.25)
    both = loss_of("clip_cov", covariance_share=0.5, covariance_low=0.5, covariance_high=5.0)
    torch.testing.assert_close(both(covariance_batch())[0], row(0.0, 0.0, 1.0, -1.0))


def test_clip_covs_candidates_are_unmasked_unclipped_and_strictly_between_the_bounds() -> None:
    # means over the five unmasked tokens: log-prob -2, advantage 0; covariances 1, 0.5, 0, 1, -2.5
    # and of the masked one 6
    log_prob = row(-3.0, -2.5, -2.0, -1.0, -1.5, 0.0)
    batch = TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        # the fourth token's ratio is 1.5, beyond the clip of a good token
        behavior_log_prob=log_prob - row(0.0, 0.0, 0.0, math.log(1.5), 0.0, 0.0),
        advantage=row(-1.0, -1.0, 6.0, 1.0, -5.0, 3.0),
        mask=torch.tensor([[True] * 5 + [False]]),
    )
    covariance = token_covariance(batch)
    torch.testing.assert_close(covariance, row(1.0, 0.5, 0.0, 1.0, -2.5, 0.0))

    def dropped(low: float, high: float) -> list[int]:
        config = PolicyLossConfig(
            name="clip_cov",
            covariance_share=1.0,
            covariance_low=low,
            covariance_high=high,
            clip_high=0.28,
        )
        return chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist()

    assert dropped(-9.0, 9.0) == [0, 1, 2, 4]  # neither the clipped nor the masked token
    assert dropped(0.5, 9.0) == [0]  # a covariance at the bound is no candidate
    assert dropped(0.0, 1.0) == [1]
    assert dropped(-9.0, 0.25) == [2, 4]


def test_the_share_of_tokens_that_is_chosen_is_of_those_that_are_not_padding() -> None:
    # 4 tokens and 4 of padding: a share of 0.5 is 2 tokens
    short = covariance_batch()
    padded = TokenBatch(
        log_prob=torch.nn.functional.pad(short.log_prob, (0, 4), value=-9.0),
        behavior_log_prob=torch.nn.functional.pad(short.behavior_log_prob, (0, 4), value=-9.0),
        advantage=torch.nn.functional.pad(short.advantage, (0, 4), value=-9.0),
        mask=torch.nn.functional.pad(short.mask, (0, 4)),
    )
    for config in (
        PolicyLossConfig(name="clip_cov", covariance_share=0.5, covariance_low=-5.0),
        PolicyLossConfig(name="kl_cov", covariance_share=0.5),
    ):
        chosen = chosen_tokens(config, padded)
        assert int(chosen.sum()) == 2
        assert torch.equal(chosen[:, :4], chosen_tokens(config, short))
        assert not chosen[:, 4:].any()


def test_a_share_of_nothing_chooses_nothing_and_any_other_at_least_one_token() -> None:
    for share, chosen in ((0.0, 0), (1e-9, 1)):
        for config in (
            PolicyLossConfig(name="clip_cov", covariance_share=share, covariance_low=-5.0),
            PolicyLossConfig(name="kl_cov", covariance_share=share),
        ):
            assert int(chosen_tokens(config, covariance_batch()).sum()) == chosen


def test_padding_has_no_covariance_and_is_not_penalised_where_that_of_every_token_is_lower() -> (
    None
):
    # means -1.5 and 2: covariances -0.5 and -0.5; of the padding it would be (0 - 2) * (0 + 1.5)
    batch = TokenBatch(
        log_prob=row(-2.0, -1.0, -7.0),
        behavior_log_prob=row(-2.0, -1.0, -7.0),
        advantage=row(3.0, 1.0, 9.0),
        mask=torch.tensor([[True, True, False]]),
    )
    torch.testing.assert_close(token_covariance(batch), row(-0.5, -0.5, 0.0))
    config = PolicyLossConfig(name="kl_cov", covariance_share=0.5)
    # of equal ones the last
    assert chosen_tokens(config, batch).tolist() == [[False, True, False]]
    for name in ("kl_cov", "clip_cov"):
        assert loss_of(name)(batch)[1].metrics()["covariance"] == pytest.approx(-0.5)
    alone = dataclasses.replace(batch, mask=torch.tensor([[True, False, False]]))
    torch.testing.assert_close(token_covariance(alone), row(0.0, 0.0, 0.0))


def test_candidates_are_taken_evenly_spaced() -> None:
    log_prob = row(*[-1.0] * 8)
    batch = TokenBatch(log_prob, log_prob, row(*[1.0] * 8), torch.ones(1, 8, dtype=torch.bool))
    # 3 of 8 candidates
    config = PolicyLossConfig(name="clip_cov", covariance_share=0.375, covariance_low=-1.0)
    assert chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist() == [0, 2, 5]


def test_clip_cov_without_a_candidate_is_ppo() -> None:
    losses, diagnostics = loss_of("clip_cov", covariance_share=1.0, covariance_low=2.0)(
        covariance_batch()
    )
    torch.testing.assert_close(losses, row(1.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == 0.0


@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig(
            name="clip_cov", covariance_share=0.5, covariance_low=0.5, covariance_high=5.0
        ),
        PolicyLossConfig(name="kl_cov", covariance_share=0.34),
        PolicyLossConfig(name="m2po", max_second_moment=0.07),
    ],
    ids=lambda config: config.name,
)
def test_tokens_chosen_beforehand_are_those_that_the_loss_chooses_among_all(
    config: PolicyLossConfig,
) -> None:
    batch = TokenBatch(
        log_prob=row(-3.0, -1.0, -1.0, -3.0).T,
        behavior_log_prob=row(-3.1, -1.0, -0.5, -3.0).T,
        advantage=row(-1.0, 1.0, -1.0, 1.0).T,
        mask=torch.ones(4, 1, dtype=torch.bool),
    )
    loss = policy_loss(config)
    given = dataclasses.replace(batch, chosen_tokens=chosen_tokens(config, batch))
    parts = [slice(0, 1), slice(1, 4)]
    whole, _ = loss(batch)
    torch.testing.assert_close(torch.cat([loss(given.rows(part))[0] for part in parts]), whole)
    assert not torch.equal(torch.cat([loss(batch.rows(part))[0] for part in parts]), whole)


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance() -> None:
    # means: log-prob 0, advantage 0 -> covariances 2 log 2, -log 2 and 0
    batch = batch_of((2.0, 0.5, 1.0), (2.0, 1.0, -3.0))
    losses, diagnostics = loss_of("kl_cov", covariance_share=0.34, penalty_coef=0.1)(batch)
    torch.testing.assert_close(losses, row(-4.0 + 0.1 * math.log(2), -0.5, 3.0))
    assert diagnostics.metrics()["penalised_fraction"] == pytest.approx(1 / 3)


def probabilities(
    current: tuple[float, ...], acted: tuple[float, ...], advantages: tuple[float, ...]
) -> TokenBatch:
    return TokenBatch(
        log_prob=ratios_of(*current).requires_grad_(),
        behavior_log_prob=ratios_of(*acted),
        advantage=row(*advantages),
        mask=torch.ones(1, len(current), dtype=torch.bool),
    )


def test_dppo_drops_tokens_whose_probability_moved_too_far_the_wrong_way() -> None:
    # p - q = 0.3, 0.3, -0.3, -0.3 with A = +, -, +, -; wrong way: up and good, down and bad
    batch = probabilities((0.8, 0.8, 0.2, 0.2), (0.5, 0.5, 0.5, 0.5), (1.0, -1.0, 1.0, -1.0))
    losses, diagnostics = loss_of("dppo", penalty_coef=0.0)(batch)
    torch.testing.assert_close(losses, row(0.0, 1.6, -0.4, 0.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.5)
    held, _ = loss_of("dppo", penalty_coef=0.1)(batch)
    torch.testing.assert_close(held[0, 0].item(), 0.1 * math.log(1.6) ** 2)


def test_a_rare_token_may_double_its_ratio_under_dppo_but_not_under_ppo() -> None:
    batch = probabilities((0.002,), (0.001,), (1.0,))
    assert loss_of("dppo", penalty_coef=0.0)(batch)[0].item() == pytest.approx(-2.0)
    assert loss_of("ppo")(batch)[0].item() == pytest.approx(-1.28)


def test_ipo_drops_on_both_sides_whatever_the_advantage_and_pulls_every_token_back() -> None:
    # p - q = 0.12, -0.12, 0.08; prime-rl's threshold is 0.1
    batch = probabilities((0.62, 0.38, 0.58), (0.5, 0.5, 0.5), (-1.0, 1.0, 1.0))
    losses, diagnostics = loss_of("ipo", penalty_coef=0.1)(batch)
    pulls = [0.1 * math.log(ratio) ** 2 for ratio in (1.24, 0.76, 1.16)]
    torch.testing.assert_close(losses, row(pulls[0], pulls[1], -1.16 + pulls[2]))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(2 / 3)


def test_ipo_takes_other_thresholds_and_does_without_the_pull() -> None:
    batch = probabilities((0.8, 0.2, 0.62), (0.5, 0.5, 0.5), (-1.0, 1.0, 1.0))
    wide = loss_of("ipo", probability_low=0.2, probability_high=0.2, penalty_coef=0.0)
    torch.testing.assert_close(wide(batch)[0], row(0.0, 0.0, -1.24))
    uneven = loss_of("ipo", probability_low=0.1, probability_high=0.4, penalty_coef=0.0)
    torch.testing.assert_close(uneven(batch)[0], row(1.6, 0.0, -1.24))


def test_ipo_teaches_where_every_advantage_is_zero_as_long_as_it_pulls() -> None:
    assert PolicyLossConfig(name="ipo").has_terms_without_advantage
    assert not PolicyLossConfig(name="ipo", penalty_coef=0.0).has_terms_without_advantage


def test_a_token_at_the_bound_of_a_trust_region_is_kept() -> None:
    batch = probabilities((0.75, 0.25), (0.5, 0.5), (1.0, -1.0))
    up, down = (batch.log_prob.detach().exp() - batch.behavior_log_prob.exp())[0].tolist()
    for name in ("dppo", "ipo"):
        at_the_bound = {"probability_high": up, "probability_low": -down, "penalty_coef": 0.0}
        torch.testing.assert_close(loss_of(name, **at_the_bound)(batch)[0], row(-1.5, 0.5))
        within = {
            "probability_high": 0.99 * up,
            "probability_low": -0.99 * down,
            "penalty_coef": 0.0,
        }
        assert not loss_of(name, **within)(batch)[0].any()
    high, low = (batch.log_prob.detach() - batch.behavior_log_prob)[0].exp().tolist()
    torch.testing.assert_close(
        loss_of("icepop", weight_low=low, weight_high=high)(batch)[0], row(-1.5, 0.5)
    )
    # squared log-ratios a < b: their mean is the bound
    squares = (batch.log_prob.detach() - batch.behavior_log_prob).square()[0].sort().values
    moment = float(squares.cumsum(0)[1] / 2)
    assert loss_of("m2po", max_second_moment=moment)(batch)[0].all()


def test_icepop_is_zero_outside_of_its_interval_of_ratios() -> None:
    losses, _ = loss_of("icepop")(batch_of((0.4, 0.6, 4.0, 6.0), (1.0, 1.0, -1.0, -1.0)))
    torch.testing.assert_close(losses, row(0.0, -0.6, 4.0, 0.0))


def test_opsm_drops_bad_sequences_that_the_policy_has_left() -> None:
    # mean of behavior - current log-prob: row 0: log 2 / 2 > 0.1, row 1: -log 2 / 2
    batch = TokenBatch(
        log_prob=torch.cat(
            [ratios_of(0.5, 1.0), ratios_of(2.0, 1.0), ratios_of(0.5, 1.0)]
        ).requires_grad_(),
        behavior_log_prob=torch.zeros(3, 2, dtype=torch.float64),
        advantage=torch.tensor([[-1.0], [-1.0], [1.0]], dtype=torch.float64),
        mask=torch.ones(3, 2, dtype=torch.bool),
    )
    losses, diagnostics = loss_of("opsm", max_sequence_kl=0.1)(batch)
    torch.testing.assert_close(losses, torch.cat([row(0.0, 0.0), row(2.0, 1.0), row(-0.5, -1.0)]))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)


def test_opsm_keeps_good_sequences_and_those_at_the_bound() -> None:
    # the policy has halved every probability: a drift of log 2
    for advantage in (0.5, 0.0):
        losses, told = loss_of("opsm", max_sequence_kl=0.1)(
            batch_of((0.5, 0.5), (advantage, advantage))
        )
        torch.testing.assert_close(losses, row(*[-advantage * 0.5] * 2))
        assert told.metrics()["dropped_fraction"] == 0.0
    batch = batch_of((0.5, 0.5), (-1.0, -1.0))
    assert loss_of("opsm", max_sequence_kl=sequence_drift(batch).item())(batch)[0].all()
    # a token that the sampler found certain and the policy impossible counts as 20 nats
    far = TokenBatch(
        row(-50.0, -1.0), row(0.0, -1.0), row(1.0, 1.0), torch.ones(1, 2, dtype=torch.bool)
    )
    assert sequence_drift(far).item() == 10.0


def drifted(sampler: float, proximal: float) -> TokenBatch:
    """One bad sequence of two tokens, each of log-prob -1 now."""
    return TokenBatch(
        log_prob=row(-1.0, -1.0).requires_grad_(),
        behavior_log_prob=row(sampler, sampler),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
        proximal_log_prob=row(proximal, proximal),
    )


def test_opsm_measures_the_drift_from_the_policy_that_sampled_also_under_a_correction() -> None:
    corrected = loss_of("opsm", max_sequence_kl=0.5, correction=CorrectionConfig(truncate="token"))
    far_from_the_engine, far_from_the_trainer = drifted(-0.3, -1.0), drifted(-1.0, -0.3)
    assert not corrected(far_from_the_engine)[0].any()
    assert corrected(far_from_the_trainer)[0].all()
    # the ratio of the surrogate is against the trainer's own log-probs, the rest is the weight
    # exp(-0.7)
    near = loss_of("opsm", max_sequence_kl=0.8, correction=CorrectionConfig(truncate="token"))
    torch.testing.assert_close(near(far_from_the_engine)[0], row(*[math.exp(-0.7)] * 2))


def test_by_default_opsm_drops_nothing_that_is_only_rounding_and_what_has_lost_a_tenth() -> None:
    noise = 0.03 * torch.randn(
        1000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    behavior = torch.full((1000, 7), -1.0, dtype=torch.float64)
    mask = torch.ones(1000, 7, dtype=torch.bool)
    bad = -torch.ones(1000, 1, dtype=torch.float64)
    _, told = loss_of("opsm")(TokenBatch(behavior + noise, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 0.0
    _, told = loss_of("opsm")(TokenBatch(behavior - 0.11, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 1.0


def test_the_drift_of_a_sequence_is_the_mean_over_all_its_rows() -> None:
    batch = TokenBatch(
        log_prob=torch.cat([row(-1.3, -1.9), row(-1.6, 9.0), row(-0.5, 9.0)]),
        behavior_log_prob=torch.full((3, 2), -1.0, dtype=torch.float64),
        advantage=torch.ones(3, 1, dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
    )
    told = sequence_drift(batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(told, torch.tensor([[0.6], [0.6], [-0.5]], dtype=torch.float64))
    torch.testing.assert_close(sequence_drift(batch)[:, 0], row(0.6, 0.6, -0.5)[0])


def test_m2po_drops_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    # squared log-ratios 0.01, 0.04, 0.25: means 0.01, 0.025, 0.1
    batch = batch_of((math.exp(0.5), math.exp(-0.1), math.exp(0.2)), (1.0, 1.0, 1.0))
    losses, diagnostics = loss_of("m2po", max_second_moment=0.03)(batch)
    torch.testing.assert_close(losses, row(0.0, -math.exp(-0.1), -math.exp(0.2)))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)
    kept, _ = loss_of("m2po", max_second_moment=0.11)(batch)
    assert (kept != 0.0).all()


def test_the_sequence_log_ratio_is_the_mean_over_all_rows_of_a_trajectory() -> None:
    batch = TokenBatch(
        log_prob=torch.cat([row(0.3, 0.9), row(0.6, 9.0), row(-1.0, 9.0)]),
        behavior_log_prob=torch.zeros(3, 2, dtype=torch.float64),
        advantage=torch.ones(3, 1, dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
    )
    told = sequence_log_ratio(PolicyLossConfig(name="gspo"), batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(told, torch.tensor([[0.6], [0.6], [-1.0]], dtype=torch.float64))
    # at most 0.4 each
    bounded = sequence_log_ratio(PolicyLossConfig(name="gmpo"), batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(
        bounded[:, 0], row((0.3 + 0.4 + 0.4) / 3, (0.3 + 0.4 + 0.4) / 3, -1.0)[0]
    )


def test_where_the_ratio_is_against_the_trainers_own_log_probs_so_is_the_mean() -> None:
    batch = batch_of((4.0, 4.0), (1.0, 1.0), proximal_log_prob=ratios_of(2.0, 2.0))
    for config in (
        PolicyLossConfig(name="decoupled_ppo", level="sequence"),
        PolicyLossConfig(name="gspo", correction=CorrectionConfig(truncate="token")),
    ):
        assert sequence_log_ratio(config, batch, torch.tensor([0])).item() == pytest.approx(
            math.log(2)
        )
    assert sequence_log_ratio(
        PolicyLossConfig(name="gspo"), batch, torch.tensor([0])
    ).item() == pytest.approx(math.log(4))


def test_a_token_that_the_correction_dropped_takes_no_part_in_the_ratio_of_its_sequence() -> None:
    # kappa = 1, 1, 8: the third token is dropped, so log s = (log 1.2 + log 1.0) / 2
    batch = batch_of((1.2, 1.0, 16.0), (1.0, 1.0, 1.0), proximal_log_prob=ratios_of(1.0, 1.0, 8.0))
    config = PolicyLossConfig(
        name="gspo", clip_low=0.5, clip_high=0.5, correction=CorrectionConfig(mask="token")
    )
    losses, _ = policy_loss(config)(batch)
    torch.testing.assert_close(losses, row(-math.sqrt(1.2), -math.sqrt(1.2), 0.0))
    told = sequence_log_ratio(
        config, dataclasses.replace(batch, correction_weight=row(1.0, 1.0, 0.0)), torch.tensor([0])
    )
    assert told.item() == pytest.approx(math.log(1.2) / 2)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_trajectory_cut_into_rows_has_the_loss_of_the_whole(name) -> None:
    whole = batch_of((1.3, 0.8, 1.1, 1.6), (1.0, 1.0, 1.0, 1.0))
    rows = TokenBatch(
        log_prob=whole.log_prob.detach().reshape(2, 2).requires_grad_(),
        behavior_log_prob=whole.behavior_log_prob.reshape(2, 2),
        advantage=whole.advantage.reshape(2, 2),
        mask=whole.mask.reshape(2, 2),
    )
    config = PolicyLossConfig(name=name, clip_low=0.3, clip_high=0.3)
    told = sequence_log_ratio(config, rows, torch.tensor([0, 0]))
    rows = TokenBatch(**(vars(rows) | {"sequence_log_ratio": told}))
    loss = policy_loss(config)
    torch.testing.assert_close(loss(rows)[0].reshape(1, 4), loss(whole)[0])
    torch.testing.assert_close(gradient(loss, rows).reshape(1, 4), gradient(loss, whole))
