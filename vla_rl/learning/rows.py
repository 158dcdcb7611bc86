"""Conversion of decisions to rows of a forward pass: one row each, or one for all turns of a
conversation that can be joined.

    turn 1   prompt ─► reply                           one row   prompt │ reply │ what was heard │ reply
    turn 2   prompt, reply, what was heard ─► reply    mask             │ 1 .. 1│     0 .. 0     │ 1 .. 1

A turn joins the row of its agent's previous turn only if its prompt begins with exactly the tokens
of that turn. If the chat template, the tokenizer or the environment changed the past, or if the
temperature differs, it gets its own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from vla_rl.types import Observation, Step, Trajectory

Advantage: TypeAlias = float | np.ndarray
"""Advantage of one trajectory: one number for all its tokens, float [decisions], or float
[decisions, T]."""


@dataclass(frozen=True)
class Span:
    """The position of one decision's tokens, and the decision that they belong to.

    Attributes:
        decision: index among all decisions of the update.
        start, stop: columns of the row, `stop` excluded.
        episode_id: episode of its trajectory.
        number: index among the decisions of its trajectory.
        agent: the agent that decided.
    """

    decision: int
    start: int
    stop: int
    episode_id: int
    number: int
    agent: str


@dataclass
class Row:
    """One row of a forward pass, as parts that are joined end to end.

    Attributes:
        observation: observation before its first token.
        sequence: index of the trajectory.
        temperature: temperature of all its log-probs.
        grammars: (start, stop, grammar) of each part that was sampled under a grammar.
        tokens, log_probs, mask, advantage, versions, reference: parts of equal lengths; `advantage`
            in each float64 [t] or [1], `reference` is empty without a reference policy.
        spans: spans of its decisions.
    """

    observation: Observation
    sequence: int
    temperature: float
    grammars: list[tuple[int, int, str]] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    advantage: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    reference: list[np.ndarray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def seen(self) -> Observation:
        """The observation, with the grammars under which the model has to compute the log-probs of
        its tokens.
        """
        return (
            {**self.observation, "grammars": tuple(self.grammars)}
            if self.grammars
            else self.observation
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the observation, chosen by the policy or not."""
        return sum(len(part) for part in self.tokens)

    @property
    def num_read(self) -> int:
        """Number of tokens that a forward pass reads for the row, as far as they differ between
        rows: prompt and reply.
        """
        return len(self.observation.get("prompt_tokens", ())) + self.num_tokens

    def hear(self, tokens: np.ndarray, has_reference: bool) -> None:
        """Add tokens that the policy did not choose."""
        nothing = np.zeros(len(tokens))
        self.tokens.append(tokens)
        self.log_probs.append(nothing)
        self.mask.append(nothing.astype(np.bool_))
        self.advantage.append(nothing)
        self.versions.append(nothing)
        if has_reference:
            self.reference.append(nothing)

    def say(
        self,
        step: Step,
        decision: int,
        episode_id: int,
        number: int,
        advantage: np.ndarray,
        reference: np.ndarray | None,
    ) -> None:
        """Add the tokens of a decision; the numbers are those of its `Span`."""
        chunk, start = step.chunk, self.num_tokens
        versions = chunk.weight_versions
        self.tokens.append(chunk.tokens)
        self.log_probs.append(chunk.log_probs)
        self.mask.append(step.executed_tokens)
        self.advantage.append(advantage)
        self.versions.append(
            np.full(len(chunk.tokens), chunk.weight_version) if versions is None else versions
        )
        if reference is not None:
            self.reference.append(reference)
        self.spans.append(
            Span(decision, start, start + len(chunk.tokens), episode_id, number, step.agent)
        )
        if "grammar" in step.observation:
            self.grammars.append((start, start + len(chunk.tokens), step.observation["grammar"]))


def rows_of(
    trajectory: Trajectory,
    sequence: int,
    first_decision: int,
    advantage: Advantage,
    reference: Sequence[np.ndarray] | np.ndarray | None = None,
) -> list[Row]:
    """Return the rows of one trajectory, in the order of their first decisions.

    Args:
        trajectory: a recorded episode.
        sequence: its index in the update.
        first_decision: number of decisions of the update before it.
        advantage: advantage of the trajectory.
        reference: float32 [T] for each decision, or None.

    Raises: ValueError for log-probs, reference log-probs or advantages that do not fit, naming the
    episode.
    """
    by_decision = _checked_advantage(trajectory, advantage)
    _check_log_probs(trajectory)
    _check_reference(trajectory, reference)
    rows: list[Row] = []
    speaking: dict[str, tuple[Row, Step]] = {}
    for number, step in enumerate(trajectory.steps):
        heard, noted = None, step.chunk.temperature
        temperature = trajectory.episode.sampling.temperature if noted is None else noted
        if step.agent in speaking and speaking[step.agent][0].temperature == temperature:
            row, before = speaking[step.agent]
            heard = _heard_between(before, step)
        if heard is None:
            row = Row(step.observation, sequence, temperature)
            rows.append(row)
        else:
            row.hear(heard, has_reference=reference is not None)
        own = None if reference is None else reference[number]
        row.say(
            step,
            first_decision + number,
            trajectory.episode.episode_id,
            number,
            by_decision[number],
            own,
        )
        speaking[step.agent] = (row, step)
    return rows


def _heard_between(before: Step, step: Step) -> np.ndarray | None:
    """Return the tokens between the end of one reply and the start of the next.

    None if the past was changed.
    """
    prompt = step.observation.get("prompt_tokens")
    if prompt is None:
        return None
    past = np.concatenate([before.observation["prompt_tokens"], before.chunk.tokens])
    if len(prompt) < len(past) or (prompt[: len(past)] != past).any():
        return None
    heard: np.ndarray = prompt[len(past) :]
    return heard


def _check_log_probs(trajectory: Trajectory) -> None:
    for number, step in enumerate(trajectory.steps):
        found, expected = step.chunk.log_probs.shape, step.chunk.tokens.shape
        if found != expected:
            raise ValueError(
                f"decision {number} of episode {trajectory.episode.episode_id} has log_probs "
                f"{list(found)} for tokens "
                f"{list(expected)}, expected one for each."
            )


def _check_reference(
    trajectory: Trajectory, reference: Sequence[np.ndarray] | np.ndarray | None
) -> None:
    if reference is None:
        return
    expected = [step.chunk.tokens.shape for step in trajectory.steps]
    found = [row.shape for row in reference]
    if found != expected:
        raise ValueError(
            f"reference_log_probs of episode {trajectory.episode.episode_id} are {found[:3]}, "
            f"expected {expected[:3]}: one "
            "for each token of each decision."
        )


def _checked_advantage(trajectory: Trajectory, advantage: Advantage) -> np.ndarray:
    """Return the advantage as float64 [decisions, 1 or T], checked for shape and finite numbers."""
    values, num_rows = np.asarray(advantage, dtype=np.float64), len(trajectory.steps)
    lengths = {len(step.chunk.tokens) for step in trajectory.steps}
    by_token = [(num_rows, length) for length in lengths if len(lengths) == 1]
    which = f"the advantage of episode {trajectory.episode.episode_id}"
    if values.shape not in ((), (num_rows,), *by_token):
        raise ValueError(
            f"{which} is {list(values.shape)}, expected one number, [{num_rows}] for its "
            "decisions, "
            f"or [{num_rows}, {max(lengths, default=0)}] for their tokens."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{which} is not finite; look at the rewards of its group.")
    return values if values.ndim == 2 else np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))
