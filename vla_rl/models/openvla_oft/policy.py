"""OpenVLA-OFT's policies, behind the one interface of engines, learners, evaluators.

    OftPolicy ─┬─ OpenVlaOft             a chunk of action tokens
               └─ ContinuousOpenVlaOft   a chunk of numbers (Kim et al. 2025, arXiv:2502.19645)

The "tokens" of a continuous decision are float32 numbers in [-1, 1]. With the L1 head they follow a
Laplace distribution around the prediction, whose scale is the sampling temperature. Its
log-likelihood at temperature 1 is minus the absolute error (less log 2), so imitation minimises the
authors' loss, and ratios are defined. With the diffusion head, a chunk is denoised in 50
deterministic steps from noise of its own seed; it has no likelihood, so only imitation can use it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import SampledTokens
from vla_rl.engines.sampling import (
    choose_tokens,
    sampling_columns,
    seeded_uniforms,
    tempered_log_probs,
)
from vla_rl.models.observed_values import require_dicts
from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.heads import NUM_DENOISING_STEPS, add_noise, denoise
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.parts import split_parts
from vla_rl.models.prismatic.action_tokens import ActionScaler, ActionTokenizer, require_chunks
from vla_rl.models.prismatic.config import Head, NewPart, OpenVlaOftConfig, ProprioConfig
from vla_rl.models.prismatic.conventions import AS_STORED, CheckpointFormat, refuse_unused
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.policy import PrismaticPolicy
from vla_rl.models.prismatic.processor import PrismaticBatch, deduplicate, read_tokenizer
from vla_rl.types import Observation, Sampling


class OftPolicy(PrismaticPolicy[OpenVlaOftConfig, OpenVlaOftNetwork]):
    """A chunk of T = chunk_size * action_dim tokens or numbers from one bidirectional pass."""

    @staticmethod
    def build_network(config: OpenVlaOftConfig) -> OpenVlaOftNetwork:
        """Build a network with new weights, from the global random state."""
        return OpenVlaOftNetwork(config)

    @classmethod
    def _load(
        cls,
        folder: Path | str | PublicFolder,
        head: Head | None,
        format: CheckpointFormat,
        new_parts: Collection[NewPart],
        seed: int,
        device: torch.device | str,
    ) -> Self:
        origin = open_folder(folder, format.adapter)
        config = checkpoint.read_config(origin, head, format, new_parts)
        # before the weights: a tokenizer that cannot be read is reported without reading 15 GB
        tokenizer = read_tokenizer(config)
        network = checkpoint.load_network(
            config, origin, format.torch_dtype, device, new_parts, seed
        )
        return cls(config, network, tokenizer, origin)

    def features(self, batch: PrismaticBatch) -> Tensor:
        """Return the trunk's output, averaged over the positions where the action is read, [B,
        feature_size].
        """
        return batch.per_decision(self._network.compute_trunk(batch).mean(dim=1))

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return `config.json`, `tokenizer.json`, `vla_rl.json`, and the other small files of a
        loaded folder.
        """
        return checkpoint.list_files(self.config, self._tokenizer, self._origin)

    def _split_by_file(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]:
        """Split tensors by file: several for continuous heads and FiLM, as OpenVLA-OFT's code
        expects; else one.

        Only vla_rl can load a policy that is saved with adapters.
        """
        # OpenVLA-OFT's code looks for the head beside the weights and cannot read adapters inside
        # them.
        is_theirs = (
            self.config.head != "tokens" or self.config.has_film
        ) and self.config.lora is None
        return split_parts(tensors) if is_theirs else (tensors, {})

    @property
    def _proprio(self) -> ProprioConfig | None:
        return self.config.proprio


class OpenVlaOft(OftPolicy):
    """A `PolicyModel`: T = chunk_size * action_dim tokens for each decision, sampled independently
    of each other.

    Tokens are ids of the full vocabulary, as in the public checkpoints. Build one with `create`
    (random weights) or `load` (a public checkpoint). Continuous heads are `ContinuousOpenVlaOft`.
    """

    has_token_means = True
    """Whether `Sampling.by_mean` takes the means of its tokens."""

    vllm_form = "vla_rl.models.vllm.served_prismatic:serve_prismatic"
    """Function that returns the form that vLLM engines serve."""

    frozen_base = "vla_rl.models.steered.oft_bases:OftTokenBase"
    """Class of the base that it is under a head."""

    def __init__(
        self,
        config: OpenVlaOftConfig,
        network: OpenVlaOftNetwork,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        config.require(
            config.head == "tokens", "head", "tokens here; ContinuousOpenVlaOft is for the others"
        )
        super().__init__(config, network, tokenizer, origin)
        self._action_tokenizer = ActionTokenizer(
            config.llm.vocab_size, config.num_bins, config.action_bounds
        )

    @property
    def token_ids(self) -> range:
        """Ids of the action tokens."""
        first = self._action_tokenizer.first_id
        return range(first, first + self.config.num_bins)

    @classmethod
    def load(
        cls,
        folder: Path | str | PublicFolder,
        format: CheckpointFormat = AS_STORED,
        *,
        new_parts: Collection[NewPart] = (),
        seed: int = 0,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> "OpenVlaOft":
        """Read a checkpoint in the public layout, shard by shard, never twice in memory.

        Args:
            folder: a folder, read already or not, or a hub id such as
                `Haozhan72/Openvla-oft-SFT-libero-goal-traj1`.
            format: settings that the files leave out. With an adapter, parts beside it replace the
                checkpoint's.
            new_parts: parts that it lacks and that fine-tuning is to add, such as
                `proprio_projector`.
            seed: seed of the new parts' weights.
            device: device of the parameters.
            fields: fields of `format`, such as `norm_key="libero_goal"`.

        Raises: CheckpointError naming what is missing, unknown or damaged, or how much memory is
        lacking.
        """
        format = format.changed(**fields)
        refuse_unused("openvla_oft", head=format.head)
        return cls._load(folder, "tokens", format, new_parts, seed, device)

    def prepare(self, observations: Sequence[Observation]) -> PrismaticBatch:
        """Prepare the observations, on the network's device; if at most half of them differ, only
        those, and the row of each.

        The members of a group that decides once, such as on a driving scene, share one observation:
        the network sees it once, whatever their number.
        """
        require_dicts(observations)
        proprio = () if self.config.proprio is None else (self.config.proprio.key,)
        small = ("instruction", *proprio)
        # the state of a robot tells most observations apart, before any image is read
        for keys in (small, (*self.config.cameras, *small)):
            chosen, rows = deduplicate(observations, keys)
            if 2 * len(chosen) > len(observations):
                return super().prepare(observations)
        return replace(super().prepare(chosen), rows=to_device(torch.tensor(rows), self._device))

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample token ids int64 [B, T]."""
        (logits,) = self._acting(self._logits, batch)
        return self.choose(batch.per_decision(logits), samplings)

    def choose(self, logits: Tensor, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample token ids int64 [B, T] from the network's logits, one row for each decision."""
        # The likeliest of the 256 action ids is taken, as in SimpleVLA-RL and RLinf;
        # OpenVLA-OFT's own code looks at all ids.
        chosen, log_probs = choose_tokens(logits, samplings)
        return SampledTokens(chosen + self._action_tokenizer.first_id, log_probs)

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given token ids, float32 [B, T] each, over the
        action tokens only.
        """
        logits = batch.per_decision(self._network(batch))
        index = to_device(tokens, self._device) - self._action_tokenizer.first_id
        log_probs = tempered_log_probs(logits, to_device(temperatures, self._device))
        # log_probs are logits too: their softmax is the same distribution
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

    def near_log_probs(self, batch: PrismaticBatch, tokens: Tensor, width: float) -> Tensor:
        """Return the mean log-prob of the bins around each given token id, float32 [B, T], weighed
        by a Gaussian whose standard deviation is `width` bins.
        """
        log_probs = batch.per_decision(self._network(batch)).float().log_softmax(-1)
        index = to_device(tokens, self._device) - self._action_tokenizer.first_id
        away = torch.arange(log_probs.shape[-1], device=self._device) - index[..., None]
        # Neighbouring bins mean nearly the same; a demonstrated bin alone would train that its
        # neighbours are as wrong as any other.
        weights = (-0.5 * (away / width) ** 2).softmax(-1)
        return (weights * log_probs).sum(-1)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Map actions float32 [B, H, D] to token ids int64 [B, T], step by step and dimension by
        dimension.
        """
        require_chunks(actions, self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.encode(actions).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map token ids int64 [B, T] to actions float32 [B, H, D], in the environment's units."""
        grid = tokens.reshape(len(tokens), self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.decode(grid)

    def _logits(self, batch: PrismaticBatch) -> Tensors:
        return (self._network(batch),)


class ContinuousOpenVlaOft(OftPolicy):
    """A `PolicyModel` whose T = chunk_size * action_dim tokens for each decision are float32
    numbers in [-1, 1].

    Build one with `create` (random weights) or `load` (a public checkpoint with its `action_head`
    part).
    """

    def __init__(
        self,
        config: OpenVlaOftConfig,
        network: OpenVlaOftNetwork,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        config.require(
            config.head != "tokens", "head", "l1 or diffusion here; OpenVlaOft is for tokens"
        )
        super().__init__(config, network, tokenizer, origin)
        self._scaler = ActionScaler(config.action_bounds)

    @property
    def frozen_base(self) -> str | None:
        """Class of the base that it is under a head; None with the diffusion head."""
        return "vla_rl.models.steered.oft_bases:L1Base" if self.config.head == "l1" else None

    @classmethod
    def load(
        cls,
        folder: Path | str | PublicFolder,
        format: CheckpointFormat = AS_STORED,
        *,
        new_parts: Collection[NewPart] = (),
        seed: int = 0,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> "ContinuousOpenVlaOft":
        """Read a checkpoint such as `moojink/openvla-7b-oft-finetuned-libero-spatial`.

        Args: those of `OpenVlaOft.load`. `cameras` None: the checkpoint's own, else the fixed
            camera and the hand camera. `new_parts` with `action_head` turns OpenVLA, or OpenVLA-OFT
            with tokens, into a continuous policy for fine-tuning.
        """
        format = format.changed(**fields)
        return cls._load(folder, format.head, format, new_parts, seed, device)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample numbers float32 [B, T]; their log-likelihoods are zeros with diffusion."""
        if self.config.head == "diffusion":
            for sampling in samplings:
                sampling.require_no_mean()
            numbers = self._denoised(batch, samplings)
            return SampledTokens(numbers, torch.zeros_like(numbers))
        (centre,) = self._acting(self._centre, batch)
        return self.choose(centre, samplings)

    def choose(self, centre: Tensor, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample numbers float32 [B, T] around the L1 head's chunks float32 [B, T]."""
        temperatures, is_greedy = sampling_columns(samplings, centre.device)
        scale, noise = (
            temperatures[:, None],
            _laplace_noise(seeded_uniforms(samplings, centre.shape[1])),
        )
        noise = to_device(noise, centre.device) * scale
        numbers = torch.where(is_greedy[:, None], centre, centre + noise)
        return SampledTokens(numbers, _laplace_log_prob(numbers, centre, scale))

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-likelihoods and entropies of the given numbers, float32 [B, T] each.

        With diffusion: minus the squared error of the predicted noise at one random step for each
        row. Imitation needs no more; it is not a likelihood.
        """
        numbers = to_device(tokens, self._device).float()
        if self.config.head == "diffusion":
            errors = self._noise_errors(batch, numbers)
            return -errors, torch.zeros_like(errors)
        scale = to_device(temperatures, self._device).float()[:, None]
        (centre,) = self._centre(batch)
        log_prob = _laplace_log_prob(numbers, centre, scale)
        return log_prob, (1.0 + torch.log(2.0 * scale)).expand_as(log_prob)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Map actions float32 [B, H, D] in the environment's units to numbers float32 [B, T] in
        [-1, 1].
        """
        require_chunks(actions, self.config.chunk_size, self.config.action_dim)
        return self._scaler.to_unit(actions).astype(np.float32).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map numbers float32 [B, T] to actions float32 [B, H, D], in the environment's units."""
        return self._scaler.from_unit(
            tokens.reshape(len(tokens), self.config.chunk_size, self.config.action_dim)
        )

    def _denoised(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> Tensor:
        shape = (len(samplings), self.config.chunk_size, self.config.action_dim)
        # The noise is the row's own, so a chunk is the same whatever else is in the batch.
        uniforms = seeded_uniforms(samplings, self.config.num_action_tokens).clamp(
            1e-12, 1.0 - 1e-12
        )
        normal = (math.sqrt(2.0) * torch.erfinv(2.0 * uniforms - 1.0)).float().view(shape)
        chunk = to_device(normal, self._device)
        (observation_tokens,) = self._acting(self._embed_observation, batch)
        for step in reversed(range(NUM_DENOISING_STEPS)):
            steps = torch.full((len(samplings),), step, device=self._device)
            # Observations are embedded once for all 50 steps, so the towers run once and not 50
            # times.
            (noise,) = self._acting(self._noise, batch, chunk, steps, observation_tokens)
            chunk = denoise(chunk, noise, step)
        return chunk.flatten(1)

    def _centre(self, batch: PrismaticBatch) -> Tensors:
        return (self._network.regress(batch).flatten(1).float(),)

    def _embed_observation(self, batch: PrismaticBatch) -> Tensors:
        return (self._network.embed_observation(batch),)

    def _noise(
        self, batch: PrismaticBatch, chunk: Tensor, steps: Tensor, observation_tokens: Tensor
    ) -> Tensors:
        return (self._network.predict_noise(batch, chunk, steps, observation_tokens).float(),)

    def _noise_errors(self, batch: PrismaticBatch, numbers: Tensor) -> Tensor:
        chunk = numbers.view(len(numbers), self.config.chunk_size, self.config.action_dim)
        steps = torch.randint(NUM_DENOISING_STEPS, (len(chunk),), device=chunk.device)
        noise = torch.randn_like(chunk)
        predicted = self._network.predict_noise(batch, add_noise(chunk, noise, steps), steps)
        return (predicted.float() - noise).square().flatten(1)


def _laplace_noise(uniforms: Tensor) -> Tensor:
    """Return standard Laplace noise from float64 numbers in [0, 1)."""
    centred = (uniforms - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return (-torch.sign(centred) * torch.log1p(-2.0 * centred.abs())).float()


def _laplace_log_prob(numbers: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    return -(numbers - centre).abs() / scale - torch.log(2.0 * scale)
