"""Less memory for more arithmetic: what a block computed is computed again when its gradient is needed.

    kept for the backward pass   without: everything that every block computed
                                 with:    the input of each block, and all of one block at a time

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Gradients are the same; an update
costs one forward pass more. Acting keeps nothing either way. Names of parameters stay as they are, so checkpoints do too.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint


def recompute_in_backward(*stacks: Iterable[nn.Module]) -> None:
    """Recompute each block of each stack. To be called once a network."""
    for stack in stacks:
        for block in stack:
            checkpoint(block, preserve_rng_state=False)  # nothing here is random
