"""Digest of a frozen base: SHA-256 of its tensors and small files, as they are in memory.

Features and references of stored transitions belong to one base; the digest names it whatever its folder's
path is, and changes with every weight, statistic and setting of its sampling.
"""

import hashlib
from typing import Any

import torch


def compute_base_digest(policy: Any) -> str:
    """Return the digest of a policy, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.checkpoint_tensors().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy().data)
    for name, data in sorted(policy.checkpoint_files().items()):
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
