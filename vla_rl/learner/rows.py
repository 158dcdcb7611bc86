"""Conversion of decisions to rows of a forward pass.

A row is one decision, or all turns of a conversation that can be joined.

    turn 1   prompt ─► reply                           one row   prompt │ reply │ what was heard │ reply
    turn 2   prompt, reply, what was heard ─► reply    mask             │ 1 .. 1│     0 .. 0     │ 1 .. 1

A turn joins the row of its agent's previous turn only if its prompt begins with exactly the tokens
and images of that turn. If the chat template, the tokenizer or the environment changed the past, or
if the temperature differs, it gets its own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from vla_rl.learner.columns import RECORDED
from vla_rl.types import Observation, Step, Trajectory, images_of, observed_conversation

Advantage: TypeAlias = float | np.ndarray
"""Advantage of one trajectory: one number for all its tokens, float [decisions], or float
[decisions, T]."""


@dataclass(frozen=True)
class Place:
    """The position of one decision's tokens in a row, and the decision that they belong to.

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
        parts: the recorded columns (`columns.RECORDED`) by name, each in parts of equal lengths.
        grammars: (start, stop, grammar) of each part that was sampled under a grammar.
        places: places of its decisions.
        newest: observation before its newest decision, which has the images of all.
    """

    observation: Observation
    sequence: int
    temperature: float
    parts: dict[str, list[np.ndarray]] = field(
        default_factory=lambda: {each: [] for each in RECORDED}
    )
    grammars: list[tuple[int, int, str]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    newest: Observation = field(default_factory=dict)

    @property
    def seen(self) -> Observation:
        """The observation, with the images that were heard later, and the grammars under which its
        log-probs have to be computed.
        """
        seen = dict(self.observation)
        if images := images_of(self.newest):
            seen |= observed_conversation(
                seen["prompt_tokens"], images, self.newest["image_starts"]
            )
        if self.grammars:
            seen["grammars"] = tuple(self.grammars)
        return seen

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the observation, chosen by the policy or not."""
        return sum(len(part) for part in self.parts["tokens"])

    @property
    def num_read(self) -> int:
        """Number of tokens, prompt and reply, that a forward pass reads for the row."""
        return len(self.observation.get("prompt_tokens", ())) + self.num_tokens

    def add(self, tokens: np.ndarray, **others: np.ndarray | int) -> None:
        """Add tokens with numbers of the other columns.

        A column that is not given gets its fill value.
        """
        given = {"tokens": tokens, **others}
        for name, column in RECORDED.items():
            part = np.broadcast_to(given.get(name, column.fill), tokens.shape)
            self.parts[name].append(part)

    def add_decision(self, step: Step, place: Place, **others: np.ndarray) -> None:
        """Add the tokens of a decision; `others` are columns that the decision does not record."""
        chunk = step.chunk
        versions = chunk.weight_version if chunk.weight_versions is None else chunk.weight_versions
        self.add(
            chunk.tokens,
            behavior_log_prob=chunk.log_probs,
            mask=step.executed_tokens,
            weight_version=versions,
            **others,
        )
        self.places.append(place)
        self.newest = step.observation
        if "grammar" in step.observation:
            self.grammars.append((place.start, place.stop, step.observation["grammar"]))


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
            heard = _tokens_of_gap(before, step)
        if heard is None:
            row = Row(step.observation, sequence, temperature)
            rows.append(row)
        else:
            row.add(heard)
        others = {"advantage": by_decision[number]}
        if reference is not None:
            others["reference_log_prob"] = reference[number]
        start = row.num_tokens
        place = Place(
            first_decision + number,
            start,
            start + len(step.chunk.tokens),
            trajectory.episode.episode_id,
            number,
            step.agent,
        )
        row.add_decision(step, place, **others)
        speaking[step.agent] = (row, step)
    return rows


def _tokens_of_gap(before: Step, step: Step) -> np.ndarray | None:
    """Return the tokens between the end of one reply and the start of the next.

    None if the past was changed.
    """
    prompt = step.observation.get("prompt_tokens")
    if prompt is None:
        return None
    past = np.concatenate([before.observation["prompt_tokens"], before.chunk.tokens])
    if len(prompt) < len(past) or (prompt[: len(past)] != past).any():
        return None
    if not _begins_alike(images_of(step.observation), images_of(before.observation)):
        return None
    heard: np.ndarray = prompt[len(past) :]
    return heard


def _begins_alike(images: Sequence[np.ndarray], first: Sequence[np.ndarray]) -> bool:
    """Return whether the first images of a conversation are these."""
    pairs = zip(images, first, strict=False)
    return len(images) >= len(first) and all(
        image is other or np.array_equal(image, other) for image, other in pairs
    )


def _check_log_probs(trajectory: Trajectory) -> None:
    for number, step in enumerate(trajectory.steps):
        found, expected = step.chunk.log_probs.shape, step.chunk.tokens.shape
        if found != expected:
            raise ValueError(
                f"decision {number} of episode {trajectory.episode.episode_id} has log_probs "
                f"{list(found)} for tokens {list(expected)}, expected one for each."
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
            f"expected {expected[:3]}: one for each token of each decision."
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
            f"decisions, or [{num_rows}, {max(lengths, default=0)}] for their tokens."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{which} is not finite; look at the rewards of its group.")
    return values if values.ndim == 2 else np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))
