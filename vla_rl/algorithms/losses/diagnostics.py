"""Diagnostics of a policy loss: how far the policy has moved."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vla_rl.algorithms.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Diagnostics:
    """Sums over the unmasked tokens of one micro-batch, kept on the device.

    `a + b` combines micro-batches exactly.

    Attributes: float32 [] tensors without gradient.
        num_tokens: number of unmasked tokens.
        ratio_sum, ratio_max: sum and maximum of the ratio that the loss uses, at its level.
        k1_sum, k3_sum: sums over tokens of estimates of KL(behavior policy || policy).
        num_clipped: number of tokens whose loss a clip changed.
        num_dropped: number of tokens that a mask of the loss or the engine's correction dropped.
        extra_sums: other values that one loss reports, by name; logged as means over tokens.
    """

    num_tokens: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    num_clipped: Tensor
    num_dropped: Tensor
    extra_sums: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: "Diagnostics") -> "Diagnostics":
        """Combine the diagnostics of two micro-batches."""
        names = dict.fromkeys([*self.extra_sums, *other.extra_sums])
        zero = torch.zeros_like(self.num_tokens)
        return Diagnostics(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            k1_sum=self.k1_sum + other.k1_sum,
            k3_sum=self.k3_sum + other.k3_sum,
            num_clipped=self.num_clipped + other.num_clipped,
            num_dropped=self.num_dropped + other.num_dropped,
            extra_sums={
                name: self.extra_sums.get(name, zero) + other.extra_sums.get(name, zero)
                for name in names
            },
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; empty if every token was masked.

        They are `ratio_mean`, `ratio_max`, `kl_k1`, `kl_k3`, `clip_fraction`, `dropped_fraction`
        and the extra metrics.
        """
        num_tokens = float(self.num_tokens)
        if num_tokens == 0.0:
            return {}
        return {
            "ratio_mean": float(self.ratio_sum) / num_tokens,
            "ratio_max": float(self.ratio_max),
            "kl_k1": float(self.k1_sum) / num_tokens,
            "kl_k3": float(self.k3_sum) / num_tokens,
            "clip_fraction": float(self.num_clipped) / num_tokens,
            "dropped_fraction": float(self.num_dropped) / num_tokens,
            **{name: float(value) / num_tokens for name, value in self.extra_sums.items()},
        }


def diagnose(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level_log_ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    dropped: Tensor | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> Diagnostics:
    """Compute the diagnostics of one micro-batch.

    Args:
        log_ratio: float [B, T], token by token, finite; masked entries do not count.
        mask: bool [B, T].
        level_log_ratio: float [B, T], the ratio that the loss uses, if it is not the token's own.
        clipped, dropped: bool [B, T].
        extra: float [B, T] by name, to be averaged over tokens.
    """
    log_ratio = log_ratio.detach().float()
    weight = mask.float()
    ratio = (log_ratio if level_log_ratio is None else level_log_ratio.detach().float()).exp()
    # sums and counts instead of means: micro-batches of different sizes add up exactly, and nothing
    # waits for the device before the update ends
    zero = weight.sum() * 0.0
    return Diagnostics(
        num_tokens=weight.sum(),
        ratio_sum=(ratio * weight).sum(),
        ratio_max=(ratio * weight).max() if mask.numel() else zero,
        k1_sum=(-log_ratio * weight).sum(),
        k3_sum=((torch.expm1(log_ratio) - log_ratio) * weight).sum(),
        num_clipped=zero if clipped is None else (clipped & mask).float().sum(),
        num_dropped=zero if dropped is None else (dropped & mask).float().sum(),
        extra_sums={
            name: torch.where(mask, value.detach().float(), 0.0).sum()
            for name, value in (extra or {}).items()
        },
    )
