"""Flow policies behind the one interface of engines, learners, evaluators.

    acting       observation, seed ─► chain of K steps, one of them stochastic ─► chunk of actions
                                      state before, its index ─► `drawn`; state after ─► tokens, densities
    learning     observation, `drawn`, tokens ─► one pass of the expert ─► densities of the same transition
    imitating    observation, demonstrated chunk ─► -(velocity - (noise - chunk))^2 at drawn noise and times

The "tokens" of a decision are float32 numbers: the executed rows of the state after its stochastic step,
in the robot's dimensions (Flow-SDE with one stochastic step: RLinf, arXiv:2510.25889). Their log-probs
are the densities of that transition. The other rows and the padded dimensions influence them through
attention and are not counted, as in RLinf. A greedy decision follows the deterministic chain from the
noise of its own seed; it has no density, and nothing is learnt from it. Nor has one that continues the
plan of a moving robot (`real_time`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms.losses.token_batch import Predicted
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import PolicyModel, Predictions, SampledTokens
from vla_rl.engines.sampling import sampling_columns
from vla_rl.errors import CheckpointError
from vla_rl.models.families import find_family
from vla_rl.models.flow.advantage_prompt import predict_velocity
from vla_rl.models.flow.config import FlowSampling, make_config
from vla_rl.models.flow.decision_inputs import (
    add_origins,
    add_plans,
    add_stored_steps,
    add_to_chunk,
    check_stored_step,
    make_example,
    prepare_inputs,
)
from vla_rl.models.flow.imitation import imitation_errors, require_rows
from vla_rl.models.flow.network import FlowInputs, FlowLayout, FlowProcessor, Prefix
from vla_rl.models.flow.predictions import StoredSteps, predict_decisions
from vla_rl.models.flow.prefix_cache import PrefixCache, is_frozen
from vla_rl.models.flow.real_time import continue_plans
from vla_rl.models.flow.sampler import Chain, Draws, run_chain, scale_noise
from vla_rl.models.flow.trained_parts import (
    adapt_trained_layers,
    choose_trained,
    has_adapters,
    merge_adapters,
    without_adapters,
)
from vla_rl.models.flow.transitions import Transition, entropy, log_density
from vla_rl.models.observed_values import require_dicts
from vla_rl.models.prismatic.config import IMAGES_FILE, LoraConfig
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.small_files import save_folder
from vla_rl.types import Observation, Sampling


class FlowPolicy(PolicyModel[FlowInputs]):
    """A `PolicyModel` over any `FlowNetwork`; T = chunk_size * action_dim numbers for each decision.

    Args:
        network: an `nn.Module` that is a `FlowNetwork`; it is put into evaluation mode.
        processor: conversions of observations and actions.
        layout: names of tensors and small files.
        sampling: the chain.
        num_executed: rows of a chunk that are executed; None for all.

    Raises: ConfigError if the robot's action is wider than the network's, or more rows are to be executed
    than there are.
    """

    follows_plans = True
    """It continues the plan of a moving robot, if an observation has one (`with_plan`)."""

    frozen_base = "vla_rl.models.steered.bases:FlowBase"
    """Class of the base that it is under a head."""

    def __init__(
        self,
        network: Any,
        processor: FlowProcessor,
        layout: FlowLayout,
        sampling: FlowSampling,
        num_executed: int | None = None,
    ) -> None:
        self.config = make_config(network, processor, sampling, num_executed)
        self._network, self._processor, self._layout = network.eval(), processor, layout
        self._prefixes = PrefixCache()
        self._schedule, self._num_draws = sampling.schedule, sampling.imitation_draws

    @classmethod
    def load(cls, folder: Path) -> "FlowPolicy":
        """Read a folder of any flow policy, as its files say: for processes that are given a folder only.

        Raises: CheckpointError naming what is missing, unknown or damaged, or if it is another policy's.
        """
        family = find_family(folder)
        policy = family and family.load_policy(folder, AS_STORED, torch.device("cpu"))
        if not isinstance(policy, cls):
            raise CheckpointError(
                f"{folder} holds the tensors of {family.name if family else 'no flow policy'}, expected "
                "those of one; load it with vla_rl.load_policy."
            )
        return policy

    @property
    def network(self) -> nn.Module:
        """The network, which holds the parameters."""
        network: nn.Module = self._network
        return network

    @property
    def has_likelihood(self) -> bool:
        """Whether decisions have densities: with noise level 0 there are none."""
        return self._schedule.num_stochastic > 0

    @property
    def feature_size(self) -> int:
        """Width of `features`."""
        return int(self._network.feature_size)

    @property
    def has_frozen_prefix(self) -> bool:
        """Whether what depends on the observation alone is not trained, so that it can be kept."""
        return is_frozen(self._network.prefix_parameters())

    def keep_prefixes(self, max_bytes: int) -> None:
        """Keep the prefixes of observations that are scored or criticised, up to a number of bytes, for passes of
        the same observations until `drop_prefixes`. Nothing is kept if the prefix is trained.
        """
        self._prefixes.max_bytes = max_bytes if self.has_frozen_prefix else 0

    def share_prefixes(self, other: "FlowPolicy") -> None:
        """Read what another policy keeps, whose prefix has the same weights and is as frozen as this one's."""
        if self.has_frozen_prefix and other.has_frozen_prefix:
            self._prefixes = other._prefixes

    def drop_prefixes(self) -> int:
        """Free the prefixes that are kept; return how many bytes they took."""
        return self._prefixes.clear()

    def train_expert(self) -> None:
        """Let gradients reach the expert for actions alone; the prefix is frozen."""
        choose_trained(self.network, "expert", None, seed=0, freezes_prefix=True)

    def adapted(self, lora: LoraConfig, seed: int) -> "FlowPolicy":
        """Return a policy on the same network with new adapters on what is trained; at first it acts as before.
        Adapters that it has are merged first, in a copy.

        Raises: ConfigError if nothing is trained, or layers are chosen by name.
        """
        policy = self.merged() if has_adapters(self._network) else self
        return policy.with_layout(adapt_trained_layers(policy.network, policy.layout, lora, seed))

    def merged(self) -> "FlowPolicy":
        """Return a copy with its adapters merged into the weights, for software without adapters."""
        merged = self.copy()
        merge_adapters(merged.network)
        return merged.with_layout(without_adapters(merged.layout))

    def copy(self) -> "FlowPolicy":
        """Return the same policy with its own copy of the weights."""
        return self._with(copy.deepcopy(self._network), self.config.sampling)

    def with_sampling(self, sampling: FlowSampling) -> "FlowPolicy":
        """Return the same policy, on the same weights, with another chain."""
        return self._with(self._network, sampling)

    @property
    def layout(self) -> FlowLayout:
        """Names of tensors and small files of its folder."""
        return self._layout

    def with_layout(self, layout: FlowLayout) -> "FlowPolicy":
        """Return the same policy, on the same weights, with a folder of another layout."""
        return self._with(self._network, self.config.sampling, layout)

    def describe(self) -> str:
        """Describe in one line how it acts."""
        millions = sum(parameter.numel() for parameter in self._network.parameters()) / 1e6
        return f"flow policy, {millions:.2f} M parameters: {self.config.describe()}"

    def example_observation(self, seed: int) -> Observation:
        """Return an observation of noise that it can act on and score."""
        return make_example(self.config, self._processor.image_size, self._chunk_shape, seed)

    def check_drawn(self, drawn: Mapping[str, np.ndarray] | None) -> None:
        """Check what a decision has drawn, before it is scored. Raises: ValueError naming what is wrong."""
        check_stored_step(drawn, self._chunk_shape, self._schedule.num_kept)

    def prepare(self, observations: Sequence[Observation]) -> FlowInputs:
        """Prepare observations, on the network's device; equal ones once if that halves their number.

        Raises: ValueError for observations that do not suit the policy, or if only some have `drawn`.
        """
        require_dicts(observations)
        guidance, device = self.config.sampling.advantage_guidance, self._device
        inputs = prepare_inputs(self._processor, self._prefixes, observations, guidance, device)
        inputs = add_stored_steps(inputs, observations, device)
        inputs = add_origins(inputs, observations, self._processor, device)
        return add_plans(inputs, observations, self._processor, self._chunk_shape, device)

    def sample(self, batch: FlowInputs, samplings: Sequence[Sampling]) -> SampledTokens:
        """Run a chain for each decision; greedy ones, and those that continue a plan, are deterministic.

        The temperature multiplies the standard deviation of the stochastic step.
        """
        return add_to_chunk(self._sample(batch, samplings), batch.origins)

    def _sample(self, batch: FlowInputs, samplings: Sequence[Sampling]) -> SampledTokens:
        planned, weight = batch.planned, batch.plan_weight
        if planned is None or weight is None:
            return self.choose(self.read(batch), samplings)
        temperatures, _ = sampling_columns(samplings, self._device)
        draws = Draws.from_seeds(samplings, self._chunk_shape, self._schedule).to(self._device)
        # an engine acts in inference mode, whose tensors have no gradient by the state
        with torch.inference_mode(False), torch.no_grad():
            velocity = partial(self._velocity, self.read(batch))
            return self._report(
                *continue_plans(velocity, draws, self._schedule, temperatures, planned, weight)
            )

    def read(self, batch: FlowInputs) -> Prefix:
        """Read each different observation once; return a row for each decision."""
        prefix = self._prefixes.embed_prefix(self._network, batch)
        prefix = prefix if batch.rows is None else prefix.rows(batch.rows)
        return prefix if batch.plain is None else replace(prefix, plain=self.read(batch.plain))

    def choose(
        self, prefix: Prefix, samplings: Sequence[Sampling], noise: Tensor | None = None
    ) -> SampledTokens:
        """Run a chain for each decision whose observation was read before; from given noise, float32 [N, H, P],
        all chains are deterministic.
        """
        temperatures, _ = sampling_columns(samplings, self._device)
        if noise is None:
            draws = Draws.from_seeds(samplings, self._chunk_shape, self._schedule).to(self._device)
        else:
            draws = Draws.deterministic(noise)
        chain = run_chain(partial(self._velocity, prefix), draws, self._schedule, temperatures)
        return self._report(chain, draws.step)

    def _report(self, chain: Chain, step: Tensor) -> SampledTokens:
        """Return what an engine is given of finished chains, and the stochastic step of each."""
        density = log_density(chain.next_state, chain.transition)
        end = self._count(chain.chunk)
        drawn = {
            "state_before": chain.state_before,
            "step": step,
            "velocity": self._count(chain.velocity),
            "end": end,
        }
        return SampledTokens(self._count(chain.next_state), self._count(density), drawn, end)

    def log_probs(
        self, batch: FlowInputs, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return densities and entropies of given numbers, float32 [N, T] each.

        Without `drawn`, for imitation: minus the squared errors of the velocity, [N, H * D], and zeros.
        Errors of padded dimensions are spread over the others, so that the mean is that over the whole
        padded block (openpi).
        """
        numbers = to_device(tokens, self._device).float()
        if batch.step is None:
            dim, read = self.config.action_dim, self.read(batch)
            errors = imitation_errors(self._network, read, batch, numbers, dim, self._num_draws)
            return -errors, torch.zeros_like(errors)
        scale = to_device(temperatures, self._device).float()
        mean, std = scale_noise(self.predict_transition(batch), scale)
        counted = Transition(self._count(mean)[:, None], std)
        density = log_density(numbers[:, None], counted)[:, 0]
        return density, entropy(counted)[:, None].expand_as(density)

    def predict(
        self, batch: FlowInputs, tokens: Tensor, temperatures: Tensor, predicts: Predicted
    ) -> Predictions:
        """Return the predictions of stored decisions, for losses that need no likelihood and the exact KL.

        Raises: ValueError for decisions that were stored without velocity and end.
        """
        stored = StoredSteps.from_inputs(batch, self._count)
        assert batch.state_before is not None
        time = self._schedule.times(stored.step)
        velocity = self._velocity(self.read(batch), batch.state_before, time)
        numbers, scale = (to_device(each, self._device).float() for each in (tokens, temperatures))
        now = self._count(velocity)
        return predict_decisions(self._schedule, predicts, stored, now, numbers, scale)

    def predict_transition(self, batch: FlowInputs) -> Transition:
        """Return the distribution of the state after the stored stochastic step of each decision."""
        before, step = batch.state_before, batch.step
        assert before is not None
        assert step is not None
        velocity = self._velocity(self.read(batch), before, self._schedule.times(step))
        return self._schedule.transition(before, velocity, step)

    def features(self, batch: FlowInputs) -> Tensor:
        """Return features of the observations alone, [N, feature_size], for a critic."""
        features: Tensor = self._network.features(self._prefixes.embed_prefix(self._network, batch))
        return features if batch.rows is None else features[batch.rows]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions [B, h, D], h up to the horizon, to numbers float32 [B, h * D]."""
        require_rows(actions, self.config.horizon, self.config.action_dim)
        return self._processor.normalise_actions(actions).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Convert numbers [B, h * D] to actions float32 [B, h, D], in the environment's units.

        A chunk that `sample` returns has what its actions are offsets from in it.
        """
        numbers = tokens.reshape(len(tokens), -1, self.config.action_dim)
        return self._processor.restore_actions(numbers)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return every parameter under its name in the folder; views, not copies."""
        return self._layout.write_tensors(self._network)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return the small files of the folder by name."""
        files = self._layout.encode_files(self.config.sampling)
        images = self.config.training_images
        return files if images is None else {**files, IMAGES_FILE: msgspec.json.encode(images)}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into the network; every name and shape has to match."""
        self._layout.read_tensors(self._network, tensors)
        self._prefixes.clear()

    def save(self, folder: Path) -> None:
        """Write the folder, whole or not at all. Raises: CheckpointError."""
        save_folder(folder, self.checkpoint_tensors(), self.checkpoint_files())

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _with(
        self, network: Any, sampling: FlowSampling, layout: FlowLayout | None = None
    ) -> "FlowPolicy":
        parts = (network, self._processor, layout or self._layout, sampling)
        policy, images = FlowPolicy(*parts, self.config.chunk_size), self.config.training_images
        policy.config = replace(policy.config, training_images=images)
        return policy

    @property
    def _chunk_shape(self) -> tuple[int, int]:
        return self._network.horizon, self._network.action_dim

    def _velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        guidance = self.config.sampling.advantage_guidance
        return predict_velocity(self._network, prefix, x, time, guidance)

    def _count(self, values: Tensor) -> Tensor:
        """Return the counted part of [N, H, P]: executed rows, the robot's dimensions, [N, T]."""
        return values[:, : self.config.chunk_size, : self.config.action_dim].flatten(1)
