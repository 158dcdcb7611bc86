"""Sampling: frequencies are probabilities, seeds decide, impossible tokens never come."""

import numpy as np
import torch

from vla_rl.engines.sampling import choose_tokens, likeliest_tokens, pair_likeliest, seeded_uniforms
from vla_rl.types import Sampling


def test_frequencies_are_the_tempered_probabilities() -> None:
    # p is proportional to (1, 4, 16) ** (1 / 2) = (1, 2, 4) at temperature 2: 1/7, 2/7, 4/7
    logits = torch.log(torch.tensor([1.0, 4.0, 16.0])).expand(1, 20_000, 3)
    tokens, log_probs = choose_tokens(logits, [Sampling(temperature=2.0, seed=11)])
    frequencies = torch.bincount(tokens[0], minlength=3) / 20_000
    np.testing.assert_allclose(frequencies, [1 / 7, 2 / 7, 4 / 7], atol=0.015)  # more than 4 sigma
    np.testing.assert_allclose(log_probs[0].exp(), (2.0 ** tokens[0].double()) / 7, atol=1e-6)


def test_an_impossible_token_is_never_chosen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(4, 500, 5)
    tokens, _ = choose_tokens(logits, [Sampling(seed=seed) for seed in range(4)])
    assert set(tokens.unique().tolist()) == {1, 3}


def test_rows_have_streams_of_their_own() -> None:
    seeds = [Sampling(seed=3), Sampling(seed=2**62), Sampling(seed=3)]
    noise = seeded_uniforms(seeds, 8)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(seeded_uniforms(seeds[:1], 4)[0], noise[0, :4])


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 200, 4)
    logits[..., 2] = 0.1
    tokens, log_probs = choose_tokens(logits, [Sampling(greedy=True), Sampling(seed=1)])
    assert set(tokens[0].tolist()) == {2}
    assert set(tokens[1].tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(log_probs[0], 0.1 - np.log(3 + np.exp(0.1)), atol=1e-6)


def test_a_greedy_row_by_the_mean_takes_the_token_between_two_heaps() -> None:
    logits = torch.tensor([0.4, 1e-9, 1e-9, 0.3, 0.3]).log().expand(3, 2, 5)
    rows = [
        Sampling(greedy=True),
        Sampling(greedy=True, by_mean=True),
        Sampling(greedy=True, by_mean=True, temperature=0.1),
    ]
    tokens, log_probs = choose_tokens(logits, rows)
    # the colder the distribution, the nearer its mean is to the likeliest token
    assert tokens.tolist() == [[0, 0], [2, 2], [0, 0]]
    np.testing.assert_allclose(log_probs[1], np.log(1e-9), rtol=1e-5)


def test_noise_that_rounds_up_to_the_whole_means_the_last_possible_token() -> None:
    logits = torch.tensor([[[0.0, 0.3, -torch.inf]]])
    tokens, log_probs = choose_tokens(logits, [Sampling()], torch.ones(1, 1, dtype=torch.float64))
    assert tokens.tolist() == [[1]]
    assert torch.isfinite(log_probs).all()


def test_the_likeliest_tokens_are_possible_ones_in_order() -> None:
    logits = torch.log(torch.tensor([[[1.0, 4.0, 0.0, 16.0]]]))
    (row,) = pair_likeliest(*likeliest_tokens(logits, [Sampling(temperature=2.0)], 4))
    assert [token for token, _ in row] == [3, 1, 0]
    np.testing.assert_allclose(
        np.exp([log_prob for _, log_prob in row]), [4 / 7, 2 / 7, 1 / 7], atol=1e-6
    )
