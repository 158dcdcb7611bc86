"""Metrics and timelines of the ranks after an update: who computes, who waits for whom.

Every rank makes the same collectives. The rank that comes last to one waits least in it, so the
shortest of the ranks' times is the communication itself, and what another rank's is longer is
waiting for the last one.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from vla_rl.graph import Slice
from vla_rl.learner.distributed.rank_clock import RankTimes

MAX_SLICES: Final = 2000
"""Most collectives of a rank that an update's timeline shows."""


def rank_metrics(
    times: Sequence[RankTimes], seconds: float, peak_flops: float | None
) -> dict[str, float]:
    """Return the metrics by path.

    Args:
        times: times of each rank in an update, by number.
        seconds: duration of the update.
        peak_flops: operations per second of each rank's device; None if it is not known.

    Returns: for each rank `rank/K/compute_s`, the time of its passes without collectives;
    `rank/K/wait_s`, its waiting for other ranks; `rank/K/awaited_s`, the waiting of all others for
    it; `rank/K/mfu` if the peak is known. `ranks/communication_share` is the share of the update in
    collectives without waiting, `ranks/wait_share` the mean waiting of a rank as a share of the update.
    """
    lengths = np.array(
        [[end - begin for _, begin, end in each.collectives] for each in times], dtype=np.float64
    )
    least = lengths.min(axis=0)
    waits = lengths - least
    last = lengths.argmin(axis=0)
    metrics: dict[str, float] = {}
    for rank, each in enumerate(times):
        busy = sum(end - begin for _, begin, end in each.jobs)
        metrics[f"rank/{rank}/compute_s"] = max(busy - float(lengths[rank].sum()), 0.0)
        metrics[f"rank/{rank}/wait_s"] = float(waits[rank].sum())
        metrics[f"rank/{rank}/awaited_s"] = float(waits[:, last == rank].sum())
        if peak_flops is not None:
            metrics[f"rank/{rank}/mfu"] = each.flops / (seconds * peak_flops)
    metrics["ranks/communication_share"] = float(least.sum()) / seconds
    metrics["ranks/wait_share"] = float(waits.sum(axis=1).mean()) / seconds
    return metrics


def rank_slices(*parts: Sequence[RankTimes]) -> Mapping[str, tuple[Slice, ...]]:
    """Return the timeline of each rank, and of its collectives, by the name of its lane.

    Args:
        parts: times of each rank, by number, one part after another.
    """
    lanes: dict[str, tuple[Slice, ...]] = {}
    for rank, times in enumerate(zip(*parts, strict=True)):
        jobs = [Slice(*job) for each in times for job in each.jobs]
        collectives = [Slice(*made) for each in times for made in each.collectives]
        lanes[f"rank {rank}"] = tuple(jobs)
        lanes[f"rank {rank}, collectives"] = tuple(collectives[:MAX_SLICES])
    return lanes


def ranks_in_words(metrics: Mapping[str, float]) -> str:
    """Describe who waits for whom in a few words; nothing without ranks."""
    awaited = {
        name.split("/")[1]: seconds
        for name, seconds in metrics.items()
        if name.startswith("rank/") and name.endswith("/awaited_s")
    }
    if not awaited:
        return ""
    rank = max(awaited, key=lambda rank: awaited[rank])
    shares = [metrics[f"ranks/{what}_share"] for what in ("wait", "communication")]
    return f"ranks wait {shares[0]:.0%}, mostly for rank {rank}; communication {shares[1]:.0%}"
