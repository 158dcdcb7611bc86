"""Rules that a policy family has to keep, as tests to inherit.

What they protect is the importance ratio. A learner divides the probability of a token under its weights by
the log-prob that acting reported; where the two are computed differently, a run learns from noise that no
metric names.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from vla_rl.engines import PolicyModel, SampledTokens
from vla_rl.engines.policy_model import missing_methods, unfit_for_learning
from vla_rl.errors import CheckpointError
from vla_rl.types import Observation, Sampling, with_drawn


class PolicyContract:
    """Rules of a policy family. Overwrite `make_policy` and `make_observations`."""

    tolerance: ClassVar[float] = 1e-5
    """Largest difference of numbers that are equal up to the order of additions."""

    greedy_has_noise: ClassVar[bool] = False
    """Whether a greedy choice depends on its seed, as the end of a flow depends on its noise."""

    def make_policy(self) -> PolicyModel[Any]:
        """Make the policy; each call gives the same weights."""
        raise NotImplementedError

    def make_observations(self) -> list[Observation]:
        """Return three observations or more, with texts of different lengths if it reads any."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def policy(cls) -> PolicyModel[Any]:
        return cls().make_policy()

    def sample(
        self, policy: PolicyModel[Any], temperature: float = 1.0, **sampling: Any
    ) -> tuple[list[Observation], Any, SampledTokens]:
        """Sample for all observations.

        Returns: what the learner prepares to score the choices, that batch, and the choices.
        """
        observations = self.make_observations()
        first = sampling.pop("seed", 0)
        samplings = [
            Sampling(temperature=temperature, seed=first + row, **sampling)
            for row in range(len(observations))
        ]
        with torch.inference_mode():
            sampled = policy.sample(policy.prepare(observations), samplings)
        if sampled.drawn:
            observations = [
                with_drawn(each, {name: rows[row].numpy() for name, rows in sampled.drawn.items()})
                for row, each in enumerate(observations)
            ]
        return observations, policy.prepare(observations), sampled

    def test_it_has_every_method_and_learns_what_it_acts(self, policy: PolicyModel[Any]) -> None:
        assert missing_methods(policy, PolicyModel) == []
        assert unfit_for_learning(policy) is None

    @pytest.mark.parametrize("temperature", [1.0, 1.7])
    def test_sampled_tokens_have_the_log_probs_that_were_reported(
        self, policy: PolicyModel[Any], temperature: float
    ) -> None:
        _, batch, sampled = self.sample(policy, temperature)
        tokens, reported = sampled.tokens, sampled.log_probs
        found, entropy = score(policy, batch, tokens, temperature)
        assert tokens.shape == reported.shape == found.shape
        torch.testing.assert_close(found, reported, atol=self.tolerance, rtol=0.0)
        for numbers in (reported, found, entropy):
            assert numbers.dtype == torch.float32
            assert numbers.isfinite().all()
        if not tokens.is_floating_point():  # densities of numbers may be above 1
            assert (reported <= 0.0).all()

    def test_a_row_does_not_depend_on_the_other_rows(self, policy: PolicyModel[Any]) -> None:
        observations, batch, sampled = self.sample(policy)
        tokens = sampled.tokens
        together, _ = score(policy, batch, tokens)
        for row, observation in enumerate(observations):
            alone, _ = score(policy, policy.prepare([observation]), tokens[row : row + 1])
            torch.testing.assert_close(alone[0], together[row], atol=self.tolerance, rtol=0.0)

    def test_a_seed_is_all_the_chance_of_a_sample(self, policy: PolicyModel[Any]) -> None:
        drawn = torch.get_rng_state()
        tokens = self.sample(policy, seed=3)[2].tokens
        assert torch.equal(torch.get_rng_state(), drawn)
        assert torch.equal(self.sample(policy, seed=3)[2].tokens, tokens)
        assert not torch.equal(self.sample(policy, seed=40)[2].tokens, tokens)

    def test_greedy_tokens_depend_on_no_seed(self, policy: PolicyModel[Any]) -> None:
        one, other = (self.sample(policy, greedy=True, seed=seed)[2].tokens for seed in (1, 50))
        assert torch.equal(one, other) is not self.greedy_has_noise

    def test_means_of_tokens_are_taken_or_refused(self, policy: PolicyModel[Any]) -> None:
        if not getattr(policy, "has_token_means", False):
            with pytest.raises(ValueError, match=r"Sampling\.by_mean"):
                self.sample(policy, greedy=True, by_mean=True)
            return
        one, other = (
            self.sample(policy, greedy=True, by_mean=True, seed=seed)[2].tokens for seed in (1, 50)
        )
        assert torch.equal(one, other)

    def test_actions_of_tokens_are_encoded_to_the_same_actions(
        self, policy: PolicyModel[Any]
    ) -> None:
        sampled = self.sample(policy)[2]
        tokens = (sampled.tokens if sampled.chunk is None else sampled.chunk).numpy()
        actions = policy.decode(tokens)
        assert (actions.ndim, len(actions)) == (3, len(tokens))
        assert actions.dtype == np.float32
        once = policy.decode(policy.encode(actions))
        if tokens.dtype == np.int64:  # sampled numbers may lie outside the range that is encoded
            np.testing.assert_allclose(once, actions, atol=self.tolerance)
        again = policy.decode(policy.encode(once))
        np.testing.assert_allclose(again, once, atol=self.tolerance)

    def test_a_copy_has_weights_of_its_own(self, policy: PolicyModel[Any]) -> None:
        _, batch, sampled = self.sample(policy)
        before, _ = score(policy, batch, sampled.tokens)
        copied = policy.copy()
        with torch.no_grad():
            for parameter in copied.network.parameters():
                parameter.add_(1.0)
        assert torch.equal(score(policy, batch, sampled.tokens)[0], before)

    def test_checkpoint_tensors_bring_a_policy_back(self, policy: PolicyModel[Any]) -> None:
        _, batch, sampled = self.sample(policy)
        expected, _ = score(policy, batch, sampled.tokens)
        other = policy.copy()
        with torch.no_grad():
            for parameter in other.network.parameters():
                parameter.zero_()
        other.load_checkpoint_tensors(policy.checkpoint_tensors())
        assert torch.equal(score(other, batch, sampled.tokens)[0], expected)

    def test_a_checkpoint_without_one_of_its_tensors_is_refused(
        self, policy: PolicyModel[Any]
    ) -> None:
        tensors = dict(policy.checkpoint_tensors())
        missing, _ = tensors.popitem()
        with pytest.raises(CheckpointError, match=missing.rpartition(".")[2]):
            policy.copy().load_checkpoint_tensors(tensors)

    def test_observations_are_prepared_in_any_thread(self, policy: PolicyModel[Any]) -> None:
        observations, _, sampled = self.sample(policy)
        with ThreadPoolExecutor(4) as pool:
            batches = list(pool.map(policy.prepare, [observations] * 8))
        for batch in batches:
            found, _ = score(policy, batch, sampled.tokens)
            torch.testing.assert_close(found, sampled.log_probs, atol=self.tolerance, rtol=0.0)

    def test_features_have_the_declared_width_and_a_gradient_reaches_them(
        self, policy: PolicyModel[Any]
    ) -> None:
        own = policy.copy()
        observations = self.make_observations()
        features = own.features(own.prepare(observations))
        assert features.shape == (len(observations), own.feature_size)
        features.float().square().sum().backward()  # type: ignore[no-untyped-call]
        gradients = [weights.grad for weights in own.network.parameters()]
        found = [gradient for gradient in gradients if gradient is not None]
        assert found
        assert all(gradient.isfinite().all() for gradient in found)


def score(
    policy: PolicyModel[Any], batch: Any, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probs and entropies of tokens as the learner does."""
    with torch.inference_mode():
        return policy.log_probs(batch, tokens, torch.full((len(tokens),), temperature))


def move_weights(policy: Any, seed: int) -> Any:
    """Copy a policy with every weight a little elsewhere."""
    other = policy.copy()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other
