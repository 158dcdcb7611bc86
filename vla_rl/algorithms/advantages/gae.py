"""Generalised advantage estimation, for tokens, control steps or action chunks.

The kind of step is that of the values: one critic estimate per token, control step, or decision.
Two endings differ: if the task itself ended the episode, no reward can follow; if a time limit cut
it off, the critic's estimate after the last step stands for the rewards that would have followed.
"""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.returns import step_discounts
from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch
from vla_rl.algorithms.advantages.whitening import whiten as whitened


def gae(
    batch: RewardBatch, *, gamma: float = 0.99, lam: float = 0.95, whiten: bool = True
) -> Advantages:
    """GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma^n_t V_(t+1) - V_t
        A_t     = delta_t + gamma^n_t lam A_(t+1);    R_t = A_t + V_t, before A is whitened
        after the last step: V = 0 if `is_terminated`, else `final_values`; A = 0

    n_t is `durations`, the control steps of step t, or 1; so a chunk that was cut short discounts
    less. t + 1 is the next step that acted: V and A are carried through masked steps (observations,
    tool answers), not reset. Rewards within one step are not discounted against each other.

    Needs `mask`, `values`, `is_terminated`, and `final_values` if an episode was cut off. Whitening
    is over all unmasked steps of the batch.
    """
    advantage, returns, mask = _estimate(batch, gamma, lam, "gae")
    shown = whitened(advantage, mask) if whiten else advantage
    return Advantages(shown.astype(np.float32), returns.astype(np.float32), mask)


def marft_gae(
    batch: RewardBatch, *, gamma: float = 0.99, lam: float = 0.95, whiten: bool = True
) -> Advantages:
    """GAE for agents that act one after the other in a shared episode.

    This is MARFT (Liao et al. 2025, arXiv:2504.16129).

    The steps of all agents are in one row in the order of acting: turn by turn, agent by agent,
    token by token. The value that follows an agent's last token is the first value of the next
    agent, or, after the last agent, of the first agent in the next turn. Whitening is per agent
    over the batch, so that an agent with small advantages learns too.

    Needs what `gae` needs, and `agents`.
    """
    agents = batch.need("agents", "marft_gae")
    advantage, returns, mask = _estimate(batch, gamma, lam, "marft_gae")
    if whiten:
        parts = [whitened(advantage, mask & (agents == agent)) for agent in np.unique(agents[mask])]
        advantage = np.sum(parts, axis=0) if parts else advantage
    return Advantages(advantage.astype(np.float32), returns.astype(np.float32), mask)


def _estimate(
    batch: RewardBatch, gamma: float, lam: float, needed_by: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Compute advantages and returns, float64 [N, S], 0 where masked; return them with the mask."""
    mask, rewards = batch.need_mask(needed_by), batch.rewards_by_step(needed_by)
    values = np.where(mask, batch.need("values", needed_by), 0.0)
    next_value = _values_after_the_end(batch, needed_by)
    discounts = step_discounts(batch, gamma)
    advantage = np.zeros(mask.shape)
    next_advantage = np.zeros(len(mask))
    for step in reversed(range(mask.shape[1])):
        acted = mask[:, step]
        delta = rewards[:, step] + discounts[:, step] * next_value - values[:, step]
        estimate = delta + discounts[:, step] * lam * next_advantage
        next_value = np.where(acted, values[:, step], next_value)
        next_advantage = np.where(acted, estimate, next_advantage)
        advantage[:, step] = np.where(acted, estimate, 0.0)
    return advantage, np.where(mask, advantage + values, 0.0), mask


def _values_after_the_end(batch: RewardBatch, needed_by: str) -> NDArray[np.float64]:
    """Return float64 [N]: 0 if the task ended the episode, else the critic's estimate."""
    is_terminated = batch.need("is_terminated", needed_by) != 0.0
    if is_terminated.all():
        return np.zeros(len(batch))
    if batch.final_values is None:
        row = int(np.flatnonzero(~is_terminated)[0])
        raise ValueError(
            f"{batch.name_of(row)} was cut off by a time limit, but RewardBatch.final_values is "
            f"None; {needed_by!r} needs the critic's value of its final observation."
        )
    return np.where(is_terminated, 0.0, np.asarray(batch.final_values, dtype=np.float64))
