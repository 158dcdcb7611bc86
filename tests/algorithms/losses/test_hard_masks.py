"""Check that the losses that drop tokens keep one at the bound of their trust region."""

import torch
from loss_batches import (
    loss_of,
    probabilities,
    row,
)


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
