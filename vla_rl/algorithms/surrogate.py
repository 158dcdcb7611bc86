"""The clipped policy-gradient loss per token, and what it says about how far the policy moved.

Called by the learner once a micro-batch; the losses are reduced by `vla_rl.algorithms.aggregation`. Axes: B rows (whole
trajectories or single action chunks), T tokens. Masked entries are exactly 0 in value and in gradient, whatever stands
there, so padding may hold anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides before `exp`; a clamped token has no gradient."""


@dataclass(frozen=True)
class RatioDiagnostics:
    """Sums over the unmasked tokens of one micro-batch, kept on the device; `a + b` joins micro-batches exactly.

    Attributes: float32 [] tensors without gradient. `k1_sum` and `k3_sum` estimate KL(behavior policy || policy).
    """

    num_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    num_clipped: Tensor

    def __add__(self, other: "RatioDiagnostics") -> "RatioDiagnostics":
        """The diagnostics of both micro-batches together."""
        return RatioDiagnostics(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            k1_sum=self.k1_sum + other.k1_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            num_clipped=self.num_clipped + other.num_clipped,
        )

    def metrics(self) -> dict[str, float]:
        """`ratio_mean`, `ratio_max`, `kl_k1`, `kl_k3`, `clip_fraction`; empty where every token was masked."""
        num_tokens = float(self.num_tokens)
        if num_tokens == 0.0:
            return {}
        return {
            "ratio_mean": float(self.ratio_sum) / num_tokens,
            "ratio_max": float(self.ratio_max),
            "kl_k1": float(self.k1_sum) / num_tokens,
            "kl_k3": float(self.k3_sum) / num_tokens,
            "clip_fraction": float(self.num_clipped) / num_tokens,
        }


def clipped_surrogate(
    log_prob: Tensor,
    behavior_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, RatioDiagnostics]:
    """PPO's clipped objective per token, negated to be a loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        ratio = exp(clamp(log_prob - behavior_log_prob, -20, 20))
        loss  = max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip)   where A < 0 (Ye et al. 2020, arXiv:1912.09729)

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1).

    Args:
        log_prob: float [B, T], current policy; the only input that carries a gradient.
        behavior_log_prob: float [B, T], the same tokens under the weights that acted.
        advantage: float [B, T], or [B, 1] for one number a row.
        mask: bool [B, T], True where the policy chose the token.
        clip_low, clip_high: trust region of the ratio, [1 - clip_low, 1 + clip_high]; 0 <= clip_low < 1, clip_high >= 0.
        dual_clip: bound c > 1 on the loss of tokens with a negative advantage and a large ratio; None leaves it out.

    Returns: losses [B, T] with exact zeros where `mask` is False, and the diagnostics. `clip_fraction` counts the tokens
    whose loss one of the clips changed, which are those without a gradient. All masked: zeros.
    Raises: ValueError for shapes that differ or bounds out of range.
    """
    _check(log_prob, behavior_log_prob, advantage, mask, clip_low, clip_high, dual_clip)
    # masking the inputs, not the result, keeps inf and NaN of padding out of the gradient
    log_ratio = torch.where(mask, log_prob, 0.0) - torch.where(mask, behavior_log_prob, 0.0).detach()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantage = torch.where(mask, advantage.expand_as(mask), 0.0).detach()
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    losses = torch.maximum(unclipped, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantage < 0.0, torch.minimum(losses, -advantage * dual_clip), losses)
    losses = torch.where(mask, losses, 0.0)
    return losses, _diagnostics(log_ratio.detach(), mask, (losses != unclipped).detach() & mask)


def _diagnostics(log_ratio: Tensor, mask: Tensor, clipped: Tensor) -> RatioDiagnostics:
    log_ratio = log_ratio.float()
    weight = mask.float()
    ratio = log_ratio.exp()
    ratio_max = (ratio * weight).max() if mask.numel() else weight.sum()
    return RatioDiagnostics(
        num_tokens=weight.sum(),
        ratio_sum=(ratio * weight).sum(),
        ratio_max=ratio_max,
        k1_sum=(-log_ratio * weight).sum(),
        k3_sum=((torch.expm1(log_ratio) - log_ratio) * weight).sum(),
        num_clipped=clipped.float().sum(),
    )


def _check(
    log_prob: Tensor,
    behavior_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> None:
    rows, tokens = mask.shape
    for name, tensor in (("log_prob", log_prob), ("behavior_log_prob", behavior_log_prob)):
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {[rows, tokens]} like mask.")
    if advantage.shape not in (mask.shape, (rows, 1)):
        raise ValueError(f"advantage is {list(advantage.shape)}, expected {[rows, tokens]} or {[rows, 1]}.")
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask is {mask.dtype}, expected torch.bool; use mask != 0.")
    if not 0.0 <= clip_low < 1.0 or clip_high < 0.0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}; expected 0 <= clip_low < 1 and clip_high >= 0.")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}, expected > 1, or None to leave it out.")
