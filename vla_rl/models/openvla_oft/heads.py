"""Continuous heads of OpenVLA-OFT: from the trunk's output at the action's positions to numbers in
[-1, 1].

One network for both: an MLP with residual blocks over all dimensions of one control step (Kim et
al. 2025, arXiv:2502.19645, section IV). Parameter names are those of the public
`action_head--*_checkpoint.pt`.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn

from vla_rl.engines.device_lane import to_device

NUM_DENOISING_STEPS: Final = 50
"""Denoising steps in both training and inference, as in the public checkpoints."""


class ResidualMlp(nn.Module):
    """LayerNorm, linear, ReLU; two residual blocks; LayerNorm, linear."""

    def __init__(
        self, num_inputs: int, hidden_size: int, num_outputs: int, num_blocks: int = 2
    ) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(num_inputs), nn.Linear(num_inputs, hidden_size)
        self.mlp_resnet_blocks = nn.ModuleList(
            [ResidualBlock(hidden_size) for _ in range(num_blocks)]
        )
        self.layer_norm2, self.fc2 = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., num_inputs] to [..., num_outputs]."""
        x = nn.functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """x + relu(linear(norm(x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to the same shape."""
        return x + self.ffn(x)  # type: ignore[no-any-return]


class L1Head(nn.Module):
    """Head that predicts the chunk itself; trained by the mean absolute error."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.model = ResidualMlp(hidden_size * action_dim, hidden_size, action_dim)
        self._action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, H * D, hidden_size] to [B, H, D]."""
        batch, num_numbers, _ = hidden.shape
        steps = hidden.reshape(batch, num_numbers // self._action_dim, -1)
        return self.model(steps)  # type: ignore[no-any-return]


class DiffusionHead(nn.Module):
    """Head that predicts the noise in a noisy chunk, which is an input of the trunk."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.noise_predictor = nn.ModuleDict(
            {"mlp_resnet": ResidualMlp(hidden_size * action_dim, hidden_size, action_dim)}
        )
        self._action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, H * D, hidden_size] to the noise, [B, H, D]."""
        batch, num_numbers, _ = hidden.shape
        steps = hidden.reshape(batch, num_numbers // self._action_dim, -1)
        return self.noise_predictor["mlp_resnet"](steps)  # type: ignore[no-any-return]


class NoisyActionProjector(nn.Module):
    """Turns each noisy number into one token, exact GELU between the layers."""

    def __init__(self, llm_width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1, llm_width), nn.Linear(llm_width, llm_width)

    def forward(self, noisy: Tensor) -> Tensor:
        """Map [B, T] to [B, T, llm_width]."""
        return self.fc2(nn.functional.gelu(self.fc1(noisy[..., None])))  # type: ignore[no-any-return]


def time_token(step: Tensor, width: int) -> Tensor:
    """Return the sinusoidal code of a denoising step: int64 [B] to float32 [B, width],
    sines first.
    """
    half = width // 2
    frequencies = torch.exp(
        torch.arange(half, device=step.device) * (-math.log(10_000.0) / (half - 1))
    )
    angles = step[:, None].float() * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def cumulative_alphas(num_steps: int = NUM_DENOISING_STEPS) -> Tensor:
    """Return the share of signal left after each noising step, float64 [num_steps] (Nichol and
    Dhariwal 2021, arXiv:2102.09672).
    """

    def signal(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2.0) ** 2

    betas = [
        min(1.0 - signal((i + 1) / num_steps) / signal(i / num_steps), 0.999)
        for i in range(num_steps)
    ]
    return torch.cumprod(1.0 - torch.tensor(betas, dtype=torch.float64), dim=0)


def add_noise(clean: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    """Return sqrt(a_t) x + sqrt(1 - a_t) e for chunks [B, H, D] and steps int64 [B]."""
    alpha = to_device(cumulative_alphas().to(clean.dtype), clean.device)[step][:, None, None]
    return alpha.sqrt() * clean + (1.0 - alpha).sqrt() * noise


def denoise(noisy: Tensor, predicted_noise: Tensor, step: int) -> Tensor:
    """Run one deterministic DDIM step from `step` to the one before (Song et al. 2021,
    arXiv:2010.02502, eq. 12, eta = 0).

    The predicted clean chunk is clipped to [-1, 1], as the public checkpoints' scheduler does.
    """
    alphas = cumulative_alphas()
    alpha, previous = float(alphas[step]), float(alphas[step - 1]) if step > 0 else 1.0
    # The scheduler of the public checkpoints clips here; without it early steps leave [-1, 1] and
    # the chunk differs.
    clean = ((noisy - math.sqrt(1.0 - alpha) * predicted_noise) / math.sqrt(alpha)).clamp(-1.0, 1.0)
    return math.sqrt(previous) * clean + math.sqrt(1.0 - previous) * predicted_noise
