"""Kept prefixes: the learner computes a frozen prefix once an update.

Rows are read once in every epoch. A flow policy whose prefix (images and prompt) is not trained computes
the same for them each time, so that it may keep it: `FlowPolicy.keep_prefixes`.
"""

from typing import Any, Final

from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.ranks import Ranks

GIB: Final = 2**30


def count_prefix_bytes(model: Any, config: LearnerConfig) -> int:
    """Return the bytes that prefixes may take on each rank; 0 if none are kept."""
    # an engine may share the network of a learner with one epoch, and has to compute as before
    is_read_again = config.epochs > 1
    if not (is_read_again and getattr(model, "has_frozen_prefix", False)):
        return 0
    return round(config.prefix_cache_gib * GIB)


def keep_prefixes(model: Any, config: LearnerConfig) -> None:
    """Let a policy keep prefixes, if rows are read again and its prefix is frozen."""
    num_bytes = count_prefix_bytes(model, config)
    if num_bytes:
        model.keep_prefixes(num_bytes)


async def drop_prefixes(ranks: Ranks, config: LearnerConfig) -> dict[str, float]:
    """Free the prefixes that every rank keeps, at the end of an update; return the metric of the largest."""

    async def drop(rank: Any, _: None) -> int:
        num_bytes: int = await rank.drop_prefixes()
        return num_bytes

    found = await ranks.compute(drop, [None] * config.row_groups)
    return {"update/kept_prefix_gib": max(found) / GIB}
