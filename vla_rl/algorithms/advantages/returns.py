"""Advantages from discounted returns: GAE, MARFT's GAE, REINFORCE++, ReMax.

GAE works for tokens, control steps or action chunks. The kind of step is that of the values: one
critic estimate per token, control step, or decision. Two endings differ: if the task itself ended the
episode, no reward can follow; if a time limit cut it off, the critic's estimate after the last step
stands for the rewards that would have followed. The others need no critic.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.baselines import (
    by_group,
    group_advantage,
)
from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch, outcome_advantages

VARIANCE_EPSILON: Final = 1e-8
"""Added to the variance before dividing by its square root."""


def whiten_values(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Compute (x - mean) / sqrt(var + 1e-8) over all unmasked values.

    The variance is unbiased (n - 1).

    Pass the values of all micro-batches and ranks at once. Masked values become 0 (in other systems
    they keep a shifted constant). A single value becomes 0, and so do values that are all equal.

    Args:
        values: float [N, S]; anything where masked.
        mask: bool [N, S].

    Returns: float64 [N, S].
    """
    # masked values take no part: other systems keep a shifted constant at them, which a critic or a
    # loss without a mask would learn from
    chosen = np.asarray(values[mask], dtype=np.float64)
    whitened = np.zeros(mask.shape)
    # equal values are compared exactly: their deviation may be a rounding, and dividing by it would
    # make advantages of noise
    if len(chosen) > 1 and np.ptp(chosen) > 0.0:
        whitened[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + VARIANCE_EPSILON)
    return whitened


def gae(
    batch: RewardBatch,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
    bootstrap: bool = True,
) -> Advantages:
    """GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma^n_t V_(t+1) - V_t
        A_t     = delta_t + gamma^n_t lam A_(t+1);    R_t = A_t + V_t, before A is whitened
        after the last step: V = 0 if `is_terminated` or without `bootstrap`, else `final_values`; A = 0

    n_t is `durations`, the control steps of step t, or 1; so a chunk that was cut short discounts
    less. t + 1 is the next step that acted: V and A are carried through masked steps (observations,
    tool answers), not reset. Rewards within one step are not discounted against each other.

    Needs `mask`, `values`, `is_terminated`, and with `bootstrap` `final_values` if an episode was cut
    off. Whitening is over all unmasked steps of the batch.
    """
    advantage, returns, mask = _estimate(batch, gamma, lam, bootstrap, "gae")
    scaled = whiten_values(advantage, mask) if whiten else advantage
    return Advantages(scaled.astype(np.float32), returns.astype(np.float32), mask)


def marft_gae(
    batch: RewardBatch,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten: bool = True,
    bootstrap: bool = True,
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
    advantage, returns, mask = _estimate(batch, gamma, lam, bootstrap, "marft_gae")
    if whiten:
        parts = [
            whiten_values(advantage, mask & (agents == agent)) for agent in np.unique(agents[mask])
        ]
        advantage = np.sum(parts, axis=0) if parts else advantage
    return Advantages(advantage.astype(np.float32), returns.astype(np.float32), mask)


def _estimate(
    batch: RewardBatch, gamma: float, lam: float, bootstrap: bool, needed_by: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Compute advantages and returns, float64 [N, S], 0 where masked; return them with the mask."""
    mask, rewards = batch.need_mask(needed_by), batch.rewards_by_step(needed_by)
    values = np.where(mask, batch.need("values", needed_by), 0.0)
    # a time limit is no end of the task: without the critic's value there, every long episode would
    # look like a failure, which it is only where the task is to succeed within the limit
    next_value = _values_after_the_end(batch, needed_by) if bootstrap else np.zeros(len(mask))
    discounts = step_discounts(batch, gamma)
    advantage = np.zeros(mask.shape)
    next_advantage = np.zeros(len(mask))
    for step in reversed(range(mask.shape[1])):
        acted = mask[:, step]
        delta = rewards[:, step] + discounts[:, step] * next_value - values[:, step]
        estimate = delta + discounts[:, step] * lam * next_advantage
        # carried through and not reset: after a tool's answer the same episode goes on, and a reset
        # would cut the credit of every turn before it
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
            f"{batch.describe_row(row)} was cut off by a time limit, but RewardBatch.final_values is "
            f"None; {needed_by!r} needs the critic's value of its final observation."
        )
    return np.where(is_terminated, 0.0, np.asarray(batch.final_values, dtype=np.float64))


def discounted_returns(
    rewards: NDArray[np.float64], mask: NDArray[np.bool_], discounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute R_t = r_t + discount_t * R_(next step that acted).

    Steps that did not act are skipped: they neither reset the return, as in other systems, nor
    discount it.

    Args:
        rewards: float64 [N, S], 0 where masked.
        mask: bool [N, S].
        discounts: float64 [N, S], from each step to the next that acted.

    Returns: float64 [N, S], 0 where masked.
    """
    returns = np.zeros(mask.shape)
    following = np.zeros(len(mask))
    for step in reversed(range(mask.shape[1])):
        acted = mask[:, step]
        # steps that did not act do not discount either: at gamma 0.99 an observation of 500 tokens
        # would leave the reply before it 0.7 % of a reward
        following = np.where(acted, rewards[:, step] + discounts[:, step] * following, following)
        returns[:, step] = np.where(acted, following, 0.0)
    return returns


def step_discounts(batch: RewardBatch, gamma: float) -> NDArray[np.float64]:
    """Return the discounts, float64 [N, S]: gamma ** durations, or gamma for every step."""
    durations = (
        np.ones(batch.need_mask("a discounted return").shape)
        if batch.durations is None
        else batch.durations
    )
    return np.asarray(np.power(gamma, durations), dtype=np.float64)


def reinforce_plus_plus(batch: RewardBatch, *, gamma: float = 1.0) -> Advantages:
    """REINFORCE++: returns whitened over the whole batch instead of a group.

    Hu et al. 2025, arXiv:2501.03262.

        A = whiten(R),   R_t = r_t + gamma * R_(t+1)

    Needs `mask`. A time limit counts as a normal end: without a critic there is no value to
    bootstrap from.
    """
    mask = batch.need_mask("reinforce_plus_plus")
    returns = discounted_returns(
        batch.rewards_by_step("reinforce_plus_plus"), mask, step_discounts(batch, gamma)
    )
    return Advantages(
        whiten_values(returns, mask).astype(np.float32), returns.astype(np.float32), mask
    )


def reinforce_plus_plus_baseline(batch: RewardBatch) -> Advantages:
    """REINFORCE++ with a baseline: centred within the group, scaled over the batch.

    Hu et al. 2025, arXiv:2501.03262.

        A = whiten(r_i - mean(group)), over all steps if there is a mask, else over trajectories

    Needs `group`.
    """
    centred = by_group(
        batch,
        lambda rewards: group_advantage(rewards, normalise_std=False),
        "reinforce_plus_plus_baseline",
    )
    mask = np.ones((len(batch), 1), dtype=np.bool_) if batch.mask is None else batch.mask
    whitened = whiten_values(centred.advantage.astype(np.float64), mask)
    return Advantages(whitened.astype(np.float32), mask=batch.mask)


def remax(batch: RewardBatch) -> Advantages:
    """ReMax: the greedy policy's outcome from the same start is the baseline.

    Li et al. 2023, arXiv:2310.10505.

        A_t = sum of rewards from t on - r_greedy;       A = r - r_greedy if only an outcome is known

    Needs `greedy_rewards`, and no group.
    """
    greedy = batch.need("greedy_rewards", "remax")
    if batch.step_rewards is None:
        return outcome_advantages(batch, batch.rewards - greedy)
    mask, rewards = batch.need_mask("remax"), batch.rewards_by_step("remax")
    to_go = discounted_returns(rewards, mask, np.ones_like(rewards))
    return Advantages(np.where(mask, to_go - greedy[:, None], 0.0).astype(np.float32), mask=mask)
