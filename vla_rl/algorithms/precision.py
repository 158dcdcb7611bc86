"""The number format that losses are computed in."""

from vla_rl.algorithms.lazy_torch import Tensor, torch


def full_precision(tensor: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, with the gradient; return other tensors unchanged.

    A ratio of bfloat16 log-probs has 8 bits, with which 1.0004, where GSPO clips, is 1. Converting
    does not restore rounded digits, so compute log-probs from float32 logits.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
