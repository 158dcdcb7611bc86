"""Activation checkpointing, which trades compute for memory: each block is recomputed when its
gradient is needed.

    kept for the backward pass   without: all activations of every block
                                 with:    the input of each block, and all activations of one block at a time

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Gradients are
the same; an update costs one more forward pass. Acting stores no activations either way. Parameter
names do not change, so checkpoints stay compatible.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint


def recompute_in_backward(*stacks: Iterable[nn.Module]) -> None:
    """Recompute each block of each stack in the backward pass. Call it once for each network."""
    for stack in stacks:
        for block in stack:
            checkpoint(block, preserve_rng_state=False)  # nothing here is random
