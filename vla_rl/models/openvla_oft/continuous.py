"""OpenVLA-OFT with a continuous head: the chunk is numbers, not bins (Kim et al. 2025,
arXiv:2502.19645).

The "tokens" of a decision are float32 numbers in [-1, 1]. With the L1 head they follow a Laplace
distribution around the prediction, whose scale is the sampling temperature. Its log-likelihood at
temperature 1 is minus the absolute error (less log 2), so imitation minimises the authors' loss,
and ratios are defined. With the diffusion head, a chunk is denoised in 50 deterministic steps from
noise of its own seed; it has no likelihood, so only imitation can use it.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import sampling_columns, seeded_uniforms
from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.config import NewPart, OpenVlaOftConfig
from vla_rl.models.openvla_oft.heads import NUM_DENOISING_STEPS, add_noise, denoise
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.oft_policy import OftPolicy
from vla_rl.models.prismatic.action_tokens import ActionScaler
from vla_rl.models.prismatic.checkpoint_format import FILES_SAY, CheckpointFormat
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.policy import require_chunks
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.types import Sampling


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

    @classmethod
    def load(
        cls,
        folder: Path | str | PublicFolder,
        format: CheckpointFormat = FILES_SAY,
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
        origin = open_folder(folder, format.adapter)
        config = checkpoint.config_of(origin, format.head, format, new_parts)
        tokenizer = read_tokenizer(config)
        dtype = format.torch_dtype
        network = checkpoint.load_network(config, origin, dtype, device, new_parts, seed)
        return cls(config, network, tokenizer, origin)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Sample numbers float32 [B, T].

        Return them and their log-likelihoods float32 [B, T] (zeros with diffusion).
        """
        if self.config.head == "diffusion":
            numbers = self._denoised(batch, samplings)
            return numbers, torch.zeros_like(numbers)
        (centre,) = self._acting(self._centre, batch)
        temperatures, is_greedy = sampling_columns(samplings, centre.device)
        scale, noise = temperatures[:, None], _laplace(seeded_uniforms(samplings, centre.shape[1]))
        noise = to_device(noise, centre.device) * scale
        numbers = torch.where(is_greedy[:, None], centre, centre + noise)
        return numbers, _laplace_log_prob(numbers, centre, scale)

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
        uniforms = seeded_uniforms(samplings, self.config.num_action_tokens).clamp(
            1e-12, 1.0 - 1e-12
        )
        normal = (math.sqrt(2.0) * torch.erfinv(2.0 * uniforms - 1.0)).float().view(shape)
        chunk = to_device(normal, self._device)
        (seen,) = self._acting(self._seen, batch)
        for step in reversed(range(NUM_DENOISING_STEPS)):
            steps = torch.full((len(samplings),), step, device=self._device)
            (noise,) = self._acting(self._noise, batch, chunk, steps, seen)
            chunk = denoise(chunk, noise, step)
        return chunk.flatten(1)

    def _centre(self, batch: PrismaticBatch) -> Tensors:
        return (self._network.regress(batch).flatten(1).float(),)

    def _seen(self, batch: PrismaticBatch) -> Tensors:
        return (self._network.see(batch),)

    def _noise(self, batch: PrismaticBatch, chunk: Tensor, steps: Tensor, seen: Tensor) -> Tensors:
        return (self._network.predict_noise(batch, chunk, steps, seen).float(),)

    def _noise_errors(self, batch: PrismaticBatch, numbers: Tensor) -> Tensor:
        chunk = numbers.view(len(numbers), self.config.chunk_size, self.config.action_dim)
        steps = torch.randint(NUM_DENOISING_STEPS, (len(chunk),), device=chunk.device)
        noise = torch.randn_like(chunk)
        predicted = self._network.predict_noise(batch, add_noise(chunk, noise, steps), steps)
        return (predicted.float() - noise).square().flatten(1)


def _laplace(uniforms: Tensor) -> Tensor:
    """Return standard Laplace noise from float64 numbers in [0, 1)."""
    centred = (uniforms - 0.5).clamp(-0.5 + 1e-12, 0.5 - 1e-12)
    return (-torch.sign(centred) * torch.log1p(-2.0 * centred.abs())).float()


def _laplace_log_prob(numbers: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    return -(numbers - centre).abs() / scale - torch.log(2.0 * scale)
