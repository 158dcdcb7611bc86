"""Rows of a forward pass, made from the decisions of an episode.

A row is one decision, or all turns of a conversation that can be joined.

    turn 1   prompt ─► reply                              one row   prompt │ reply │ tokens between │ reply
    turn 2   prompt, reply, tokens between ─► reply       mask             │ 1 .. 1│     0 .. 0     │ 1 .. 1

A turn joins the row of its agent's previous turn only if its prompt begins with exactly the tokens
and images of that turn. If the chat template, the tokenizer or the environment changed the past, or
if the temperature differs, it gets its own row.

The columns of the rows are declared once, in `TokenColumns`: what each holds, its dtype, and the value
that fills it.

    decision ─► parts of a row ─► padded columns (`decisions`) ─► rows of a rank, a mini-batch,
                                                                  a micro-batch ─► TokenBatch

To add a column, add a field to `TokenColumns`; if a loss reads it, add a field of the same name to
`TokenBatch`. Everything between follows from the declaration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import TokenBatch
from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.types import (
    Observation,
    Step,
    Trajectory,
    get_images,
    make_conversation_observation,
    with_drawn,
)


class Recorded(NamedTuple):
    """A column that is recorded for every token, and built from the parts of its rows."""

    dtype: type[np.generic] | None
    """Type of its numbers; None: int64, or float32 if the first row has floats."""

    fill: int = 0
    """Value beyond a row's end, and of tokens that the policy did not choose."""

    narrows: bool = False
    """Whether it is kept as [N, 1] if all chosen tokens of each row have the same number."""


class ByRow(NamedTuple):
    """A column with one number for each row, which is an attribute of `rows.Row`."""


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Numbers of N rows with T tokens each: recorded by token, by row, or computed before the loss.

    N counts decisions, or conversations whose turns can be joined.
    """

    tokens: Annotated[Tensor, Recorded(None, fill=NO_TOKEN)]
    """Chosen tokens, int64 [N, T]; float32 from a policy that chooses numbers."""

    behavior_log_prob: Annotated[Tensor, Recorded(np.float32)]
    """Log-probs under the weights that acted, float32 [N, T]."""

    mask: Annotated[Tensor, Recorded(np.bool_)]
    """True if the policy chose the token and its control step ran, bool [N, T]."""

    advantage: Annotated[Tensor, Recorded(np.float32, narrows=True)]
    """Advantages, float32 [N, T], or [N, 1]."""

    weight_version: Annotated[Tensor, Recorded(np.int64, narrows=True)]
    """Version of the weights that chose each token, int64 [N, T], or [N, 1]."""

    reference_log_prob: Annotated[Tensor | None, Recorded(np.float32)] = None
    """Log-probs under the frozen reference policy, float32 [N, T]; None without a reference."""

    temperature: Annotated[Tensor, ByRow()]
    """Sampling temperature of the row's tokens, float32 [N]."""

    sequence: Annotated[Tensor, ByRow()]
    """Index of the row's trajectory, int64 [N]."""

    num_tokens: Annotated[Tensor, ByRow()]
    """Number of tokens without padding, int64 [N]."""

    num_input_tokens: Annotated[Tensor, ByRow()]
    """Number of tokens that a forward pass reads, int64 [N]: the row's own and its prompt's."""

    proximal_log_prob: Tensor | None = None
    """Log-probs under the learner's weights before the update, float32 [N, T]."""

    sequence_log_ratio: Tensor | None = None
    """Mean log-ratio over the row's whole trajectory, float32 [N, 1]."""

    sequence_drift: Tensor | None = None
    """Mean of engine's minus current log-prob over the row's whole trajectory, float32 [N, 1]."""

    correction_weight: Tensor | None = None
    """Weights of the engine correction or of decoupled_ppo over the whole update, float32 [N, T]."""

    chosen_tokens: Tensor | None = None
    """Tokens that the loss chose from the whole mini-batch, bool [N, T]."""

    action_tokens: int = 1
    """Number of tokens of one control step."""

    def named_columns(self) -> dict[str, Tensor]:
        """Return the columns that are present, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: column for name, column in named.items() if isinstance(column, Tensor)}

    def token_batch(self, log_prob: Tensor) -> TokenBatch:
        """Return the input of a policy loss, given the log-probs under the current weights."""
        return TokenBatch(
            log_prob=log_prob, **{name: getattr(self, name) for name in _READ_BY_LOSSES}
        )


def narrowed(column: Tensor, mask: Tensor) -> Tensor:
    """Return a column [N, T] as [N, 1] if the masked-in tokens of each row have one number."""
    least, most = _limits(column.dtype)
    # over the tokens that the policy chose: fill values of the others would make every row look
    # mixed
    low = torch.where(mask, column, most).amin(dim=1, keepdim=True)
    high = torch.where(mask, column, least).amax(dim=1, keepdim=True)
    return low if bool((low == high).all()) else column


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _declared() -> Iterator[tuple[str, object]]:
    for name, hint in get_type_hints(TokenColumns, include_extras=True).items():
        yield from ((name, how) for how in getattr(hint, "__metadata__", ()))


RECORDED: Final = MappingProxyType(
    {name: how for name, how in _declared() if isinstance(how, Recorded)}
)
"""Columns that are recorded for every token, by name."""

BY_ROW: Final = tuple(name for name, how in _declared() if isinstance(how, ByRow))
"""Columns with one number for each row."""

_READ_BY_LOSSES: Final = tuple(
    sorted(
        {each.name for each in fields(TokenColumns)} & {each.name for each in fields(TokenBatch)}
    )
)


Advantage: TypeAlias = float | np.ndarray
"""Advantage of one trajectory: one number for all its tokens, float [decisions], or float
[decisions, T]."""


@dataclass(frozen=True)
class DecisionSlot:
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
        parts: the recorded columns (`RECORDED`) by name, each in parts of equal lengths.
        grammars: (start, stop, grammar) of each part that was sampled under a grammar.
        slots: slots of its decisions.
        newest: observation before its newest decision, which has the images of all.
        drawn: what its log-probs depend on beside observation and tokens; such a row is one decision.

    Example:
        The second reply of a conversation, which begins after 12 tokens of the row:

        DecisionSlot(decision=7, start=12, stop=20, episode_id=431, number=1, agent="policy")
    """

    observation: Observation
    sequence: int
    temperature: float
    parts: dict[str, list[np.ndarray]] = field(
        default_factory=lambda: {each: [] for each in RECORDED}
    )
    grammars: list[tuple[int, int, str]] = field(default_factory=list)
    slots: list[DecisionSlot] = field(default_factory=list)
    newest: Observation = field(default_factory=dict)
    drawn: dict[str, np.ndarray] | None = None

    @property
    def full_observation(self) -> Observation:
        """The observation, with the images that came later, and the grammars and drawn arrays under
        which its log-probs have to be computed.
        """
        # a copy: the trajectory goes on to buffers and checkpoints, and must not get the images of
        # later turns
        observation = dict(self.observation)
        if images := get_images(self.newest):
            observation |= make_conversation_observation(
                observation["prompt_tokens"], images, self.newest["image_starts"]
            )
        if self.grammars:
            observation["grammars"] = tuple(self.grammars)
        return with_drawn(observation, self.drawn)

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the observation, chosen by the policy or not."""
        return sum(len(part) for part in self.parts["tokens"])

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens, prompt and reply, that a forward pass reads for the row."""
        return len(self.observation.get("prompt_tokens", ())) + self.num_tokens

    def add_tokens(self, tokens: np.ndarray, **others: np.ndarray | int) -> None:
        """Add tokens with numbers of the other columns.

        A column that is not given gets its fill value.
        """
        given = {"tokens": tokens, **others}
        for name, column in RECORDED.items():
            part = np.broadcast_to(given.get(name, column.fill), tokens.shape)
            self.parts[name].append(part)

    def add_decision(self, step: Step, slot: DecisionSlot, **others: np.ndarray) -> None:
        """Add the tokens of a decision; `others` are columns that the decision does not record."""
        chunk = step.chunk
        versions = chunk.weight_version if chunk.weight_versions is None else chunk.weight_versions
        self.add_tokens(
            chunk.tokens,
            behavior_log_prob=chunk.log_probs,
            mask=step.executed_tokens,
            weight_version=versions,
            **others,
        )
        self.slots.append(slot)
        self.newest, self.drawn = step.observation, chunk.drawn
        if "grammar" in step.observation:
            self.grammars.append((slot.start, slot.stop, step.observation["grammar"]))


def make_rows(
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
    conversations: dict[str, tuple[Row, Step]] = {}
    for number, step in enumerate(trajectory.steps):
        between, recorded = None, step.chunk.temperature
        # what the chunk says wins: an agent may sample single decisions at a temperature of its own
        temperature = trajectory.episode.sampling.temperature if recorded is None else recorded
        if step.agent in conversations and conversations[step.agent][0].temperature == temperature:
            row, before = conversations[step.agent]
            between = _tokens_between(before, step)
        if between is None:
            row = Row(step.observation, sequence, temperature)
            rows.append(row)
        else:
            row.add_tokens(between)
        others = {"advantage": by_decision[number]}
        if reference is not None:
            others["reference_log_prob"] = reference[number]
        start = row.num_tokens
        slot = DecisionSlot(
            first_decision + number,
            start,
            start + len(step.chunk.tokens),
            trajectory.episode.episode_id,
            number,
            step.agent,
        )
        row.add_decision(step, slot, **others)
        conversations[step.agent] = (row, step)
    return rows


def _tokens_between(before: Step, step: Step) -> np.ndarray | None:
    """Return the tokens between the end of one reply and the start of the next.

    None if the past was changed.
    """
    prompt = step.observation.get("prompt_tokens")
    if prompt is None or step.chunk.drawn is not None or before.chunk.drawn is not None:
        return None
    # compared token by token: a template that drops old reasoning, or a tokenizer that merges
    # across the seam, gives other tokens for the same text
    past = np.concatenate([before.observation["prompt_tokens"], before.chunk.tokens])
    if len(prompt) < len(past) or (prompt[: len(past)] != past).any():
        return None
    if not _begins_alike(get_images(step.observation), get_images(before.observation)):
        return None
    between: np.ndarray = prompt[len(past) :]
    return between


def _begins_alike(images: Sequence[np.ndarray], first: Sequence[np.ndarray]) -> bool:
    """Return whether the first images of a conversation are these."""
    pairs = zip(images, first, strict=False)
    return len(images) >= len(first) and all(
        # identity first: turns of a conversation mostly hold the same array, and comparing pixels
        # of every turn would be quadratic
        image is other or np.array_equal(image, other)
        for image, other in pairs
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
    # one NaN here makes the loss of the whole update NaN, and the optimizer would skip the step
    # without knowing whose reward it was
    if not np.isfinite(values).all():
        raise ValueError(f"{which} is not finite; look at the rewards of its group.")
    return values if values.ndim == 2 else np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))
