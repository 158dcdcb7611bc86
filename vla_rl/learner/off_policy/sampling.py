"""Which rows of the replay buffer a gradient step reads, for the critic and for the actor.

The critic's rows come as they are stored (half of them demonstrations for rlpd). The actor's may have
more successes: that changes what it imitates, but not what a value means.
"""

import logging
from collections.abc import Mapping
from typing import Final

import numpy as np

from vla_rl.learner.off_policy.config import IMITATING, OffPolicyConfig
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.replay import ReplayBuffer
from vla_rl.replay.sampling import EVERY_ROW, Stratum
from vla_rl.types import derive_seed

_log = logging.getLogger(__name__)

Shares = Mapping[Stratum, float]

AWAITED: Final[frozenset[Stratum]] = frozenset({"demonstrations", "labelled"})
"""Rows that a run has from its first gradient step on, if it has some at all; successes may come later."""


def critic_strata(config: OffPolicyConfig) -> Shares:
    """Return the shares of the critic's batch; those of the actor too, if it has none of its own."""
    share = config.demonstrations
    if share is None:
        return EVERY_ROW
    return {"demonstrations": share, "online": 1.0 - share}


def actor_strata(config: OffPolicyConfig) -> Shares | None:
    """Return the shares of the actor's batch; None: it reads the critic's."""
    share = config.actor_successes
    if config.algorithm == "dagger":
        anchors = share or 0.0
        return {"labelled": 1.0 - anchors, "successes": anchors}
    if share is None:
        return None
    return {"successes": share, "failures": 1.0 - share}


def present_strata(buffer: ReplayBuffer, strata: Shares) -> Shares | None:
    """Return the shares without those of strata that have no row yet, so that they add up to 1 again.

    None: no stratum has a row.
    """
    missing = set(buffer.missing_strata(strata))
    found = {name: share for name, share in strata.items() if share and name not in missing}
    total = sum(found.values())
    return {name: share / total for name, share in found.items()} if found else None


class RowSampler:
    """Draws the rows of gradient steps.

    Args:
        replay: the replay buffer.
        config: batch size and shares.
        seed: seed of the run.
    """

    def __init__(self, replay: RunReplay, config: OffPolicyConfig, seed: int) -> None:
        self._replay, self._batch, self._algorithm = replay, config.batch, config.algorithm
        self._critic, self._actor = critic_strata(config), actor_strata(config)
        self._seeds = {name: derive_seed(seed, "rows", name) for name in ("critic", "actor")}
        self._warned: set[Stratum] = set()

    def draw_critic_rows(self, step: int) -> np.ndarray | None:
        """Return the critic's rows of a gradient step, counted from 0; None: there are none yet."""
        return self._draw("critic", step, self._critic)

    def draw_actor_rows(self, step: int) -> np.ndarray | None:
        """Return rows of the actor's own; None: it reads the critic's, or there are none yet."""
        return None if self._actor is None else self._draw("actor", step, self._actor)

    @property
    def has_actor_rows(self) -> bool:
        """Whether the actor reads rows of its own."""
        return self._actor is not None

    @property
    def wanted_by_actor(self) -> list[Stratum]:
        """Strata that the actor reads, if they are its own."""
        return [name for name, share in (self._actor or {}).items() if share]

    @property
    def has_nothing_to_imitate(self) -> bool:
        """Whether the algorithm learns from rows of certain strata alone, and none has a row yet."""
        is_imitating = self._algorithm in IMITATING and self._actor is not None
        return is_imitating and present_strata(self._replay.buffer, self._actor or {}) is None

    def _draw(self, name: str, step: int, strata: Shares) -> np.ndarray | None:
        buffer = self._replay.buffer
        present = present_strata(buffer, strata)
        if present is None:
            return None
        wanted = {name for name, share in strata.items() if share}
        for stratum in sorted((wanted & AWAITED) - {*present, *self._warned}):
            self._warned.add(stratum)
            _log.warning(
                "the replay buffer has no row of %s, expected %.0f %% of a batch; the other rows are drawn instead.",
                stratum,
                100.0 * strata[stratum],
            )
        return buffer.sample(seed=self._seeds[name], update=step, batch=self._batch, strata=present)
