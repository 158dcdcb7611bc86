"""The number format that losses are computed in."""

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, with the gradient; other tensors are returned as they are.

    A ratio of bfloat16 log-probs has 8 bits: 1.0004, where GSPO clips, is 1 there. Digits that were
    rounded off before stay lost, so compute log-probs from float32 logits.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
