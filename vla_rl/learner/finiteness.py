"""Checks of the numbers that other components give to a learner, made once where they enter.

    engine, reference ─► log-probs ─► flatten_trajectories ─┐
    trainer, reference ─► log-probs ─► score_decisions ─────┼─► a loss
    critic ─► values ─► Critic.values, .update ─────────────┘

A NaN or an infinity would not stop a run later: the losses' clamps, clips and masks turn it into a
token without a gradient. So each such number is rejected here, with its episode, decision and
token. Advantages are checked in `rows`, rewards in `RewardBatch`. Masked tokens may hold anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.learner.rows import DecisionSlot
from vla_rl.types import DEFAULT_AGENT, MAX_LOG_PROB, Trajectory

Drawn: TypeAlias = Mapping[str, np.ndarray] | None
"""`ActionChunk.drawn`."""


class TokenRows(Protocol):
    """Rows of tokens as far as checks read them: `Decisions`, which are checked when made."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...
    @property
    def slots(self) -> Sequence[Sequence[DecisionSlot]]: ...
    def rows(self, index: Tensor) -> Self: ...


def require_log_probs(decisions: TokenRows, log_probs: Tensor, whose: str, remedy: str) -> None:
    """Raise ValueError unless every unmasked log-prob, float [N, T] on the CPU, is possible for a
    policy.

    A policy that chooses continuous numbers (float tokens) has densities, whose logs may be above
    0.

    Args:
        decisions: rows of the log-probs.
        log_probs: numbers to check.
        whose: owner of the log-probs, in the error.
        remedy: advice in the error.
    """
    is_density = decisions.tokens.is_floating_point()
    nonfinite = decisions.mask & ~log_probs.isfinite()
    # an engine that reports logits is finite too, and wrong in every ratio; densities may be above
    # 1
    if not is_density:
        nonfinite |= decisions.mask & (log_probs > MAX_LOG_PROB)
    if not nonfinite.any():
        return
    row, column = (int(index) for index in nonfinite.nonzero()[0])
    expected = "a finite number" if is_density else "a finite number of at most 0"
    raise ValueError(
        f"{whose} log-prob of {describe_token(decisions, row, column)} is "
        f"{float(log_probs[row, column])}, expected {expected}; {remedy}."
    )


def require_drawn(
    trajectories: Sequence[Trajectory], check_drawn: Callable[[Drawn], None] | None
) -> None:
    """Raise ValueError, naming episode and decision, unless each decision has what it is scored with.

    Args:
        trajectories: recorded episodes.
        check_drawn: the policy's own check of `ActionChunk.drawn`; None for a policy that needs nothing.
    """
    if check_drawn is None:
        return
    for trajectory in trajectories:
        for number, step in enumerate(trajectory.steps):
            try:
                check_drawn(step.chunk.drawn)
            except ValueError as error:
                raise ValueError(
                    f"decision {number} of episode {trajectory.episode.episode_id} cannot be scored: "
                    f"{error}"
                ) from error


def describe_token(decisions: TokenRows, row: int, column: int) -> str:
    """Name a token of a row by its episode, the decision in the episode and the token in the
    decision, counted from 0.
    """
    # tokens between two turns have no slot, and are masked: none of them is ever checked
    slot = next(each for each in decisions.slots[row] if each.start <= column < each.stop)
    agent = "" if slot.agent == DEFAULT_AGENT else f" of agent {slot.agent!r}"
    token = column - slot.start
    return f"token {token} of decision {slot.number}{agent} of episode {slot.episode_id}"


def first_nonfinite(log_prob: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """Find a log-prob that is infinite, which clamps hide, or an entropy that is not finite.

    NaN log-probs are not searched for: they make the whole gradient NaN, and the optimizer skips
    that step and reports it.

    Args:
        log_prob, entropy: float [B, T], under the trained weights, on any device.
        mask: bool [B, T].

    Returns: int64 [], its number in the flattened tokens, counted from 1; 0 for none. It stays on
    the device.
    """
    nonfinite = mask & (log_prob.isinf() | (log_prob.isfinite() & ~entropy.isfinite()))
    flat = nonfinite.detach().flatten()
    # a number on the device: asking for a bool here would make the host wait in every micro-batch
    return torch.where(flat.any(), flat.to(torch.uint8).argmax() + 1, 0)


def require_finite_outputs(
    minibatch: TokenRows, indices: Sequence[Tensor], found: Sequence[Tensor], model: str
) -> None:
    """Raise ValueError, naming the token, if `first_nonfinite` found one in a micro-batch.

    Args:
        minibatch: all rows.
        indices: rows of each micro-batch.
        found: what `first_nonfinite` returned for each.
        model: name of the policy's class.
    """
    # all micro-batches are read in one copy, after the mini-batch: the error still names the token
    for index, number in zip(indices, torch.stack(list(found)).tolist(), strict=True):
        if number > 0:
            rows = minibatch.rows(index)
            where = describe_token(rows, *divmod(number - 1, rows.mask.shape[1]))
            raise ValueError(
                f"{model}.log_probs gave an infinite log-prob, or an entropy that is not finite, "
                f"for {where}; expected finite numbers. Learner and engine must allow the same "
                "tokens: look at masked logits."
            )


@dataclass(frozen=True)
class TrajectoryValues:
    """A critic's values of one trajectory.

    Attributes:
        values: float32 [decisions], the value of the observation before each decision.
        bootstrap: value of the last observation; 0 if the task itself ended the episode, because no
            reward can follow.
    """

    values: np.ndarray
    bootstrap: float


def require_values(trajectories: Sequence[Trajectory], values: Sequence[TrajectoryValues]) -> None:
    """Raise ValueError unless a critic's values have the right shape and are finite.

    The error names episode and decision.

    Example:
        Three decisions of an episode that a time limit cut off:

        TrajectoryValues(values=np.array([0.31, 0.42, 0.40], np.float32), bootstrap=0.44)
    """
    if len(trajectories) != len(values):
        raise ValueError(
            f"values of {len(values)} trajectories for {len(trajectories)}, expected one `TrajectoryValues` "
            "for each."
        )
    for trajectory, each in zip(trajectories, values, strict=True):
        _require_each(
            trajectory, each.values, "values", "look at the critic's learning rate and value_scale"
        )
        if not np.isfinite(each.bootstrap):
            raise ValueError(
                "the critic's value of the final observation of episode "
                f"{trajectory.episode.episode_id} is {each.bootstrap}, expected a finite number; "
                "look at its learning rate and value_scale."
            )


def require_returns(trajectories: Sequence[Trajectory], returns: Sequence[np.ndarray]) -> None:
    """Raise ValueError unless a critic's targets have the right shape and are finite.

    The error names episode and decision.
    """
    if len(trajectories) != len(returns):
        raise ValueError(
            f"{len(returns)} returns for {len(trajectories)} trajectories, expected "
            "one array for each."
        )
    for trajectory, each in zip(trajectories, returns, strict=True):
        _require_each(trajectory, each, "returns", "look at its rewards")


def _require_each(trajectory: Trajectory, numbers: np.ndarray, what: str, remedy: str) -> None:
    episode, expected = trajectory.episode.episode_id, (len(trajectory.steps),)
    if numbers.shape != expected:
        raise ValueError(
            f"the {what} of episode {episode} are {list(numbers.shape)}, expected "
            f"{list(expected)}: one for each decision."
        )
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise ValueError(
            f"the {what} of episode {episode} hold {numbers[bad[0]]} at decision {bad[0]}, "
            f"expected finite numbers; {remedy}."
        )
