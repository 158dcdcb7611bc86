"""RECAP on stored episodes: values, labels of control steps, batches with the label in the prompt.

    demonstrations ─┐                                              ┌─► instruction + "Advantage: positive"
    collected ──────┴─► frozen features ─► values ─► advantages ───┴─► instruction + "Advantage: negative"

Demonstrations and what an expert chose are positive at every step. All steps are imitated with their
label; some labels are dropped in training, so that the policy also knows what to do without one.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from vla_rl.datasets import RecordedEpisode
from vla_rl.errors import DataError
from vla_rl.run.shifted_images import shifted_batches
from vla_rl.types import Config, NonNegativeFloat, Observation, PositiveFloat, PositiveInt, Share

if TYPE_CHECKING:  # they import torch: `--help` and errors in options must not wait for it
    from torch import Tensor

    from vla_rl.engines import DeviceLane
    from vla_rl.learner.config import RecapValueConfig
    from vla_rl.models.flow.policy import FlowPolicy

READ_TOGETHER: Final = 32
"""Control steps whose features are computed in one pass."""


class AdvantageLabelConfig(Config, frozen=True, kw_only=True):
    """Which control steps are called positive."""

    positive_share: Share = 0.3
    """Share of the control steps of each task that are positive: those with the highest advantages. A weak
    policy has few good steps: verl-vla took 0.05 where 16 % of the episodes succeeded."""

    lookahead: PositiveInt = 50
    """Control steps whose rewards an advantage adds up before it takes the value of where they led."""

    smoothing_window: PositiveInt = 50
    """Control steps over which advantages are averaged, from each step on; 1 does not average."""

    smoothing_decay: PositiveFloat = 0.95
    """Weight of each further step in that average, at most 1."""

    failure_cost: NonNegativeFloat = 1.0
    """Cost of a failure beside its control steps, in lengths of the task's longest episode."""

    dropout: Share = 0.3
    """Share of the training samples that are shown without their label. Guidance needs some."""

    def __post_init__(self) -> None:
        self.require(self.smoothing_decay <= 1.0, "smoothing_decay", "a number above 0, at most 1")


@dataclass(frozen=True)
class LabelledEpisodes:
    """Episodes whose instructions end with labels.

    Attributes:
        episodes: demonstrations, then collected ones, with an instruction for each control step.
        lines: what was found, for the terminal.
    """

    episodes: tuple[RecordedEpisode, ...]
    lines: tuple[str, ...]


async def label_episodes(
    policy: "FlowPolicy",
    lane: "DeviceLane",
    demonstrations: Sequence[RecordedEpisode],
    collected: Sequence[RecordedEpisode],
    labels: AdvantageLabelConfig,
    value: "RecapValueConfig",
    seed: int,
) -> LabelledEpisodes:
    """Learn values of all control steps, and label each.

    Args:
        policy: gives the features; it is not trained here.
        lane: computes.
        demonstrations: successes of an expert, positive at every step.
        collected: episodes of policies, which say whether they succeeded.
        labels: which steps are positive.
        value: the value network.
        seed: of the value network.

    Raises: DataError if a collected episode does not say whether it succeeded, or a labelled instruction is
    too long for the policy.
    """
    import torch

    from vla_rl.learner.recap_values import fit_values

    episodes = (*demonstrations, *collected)
    if unknown := next((each for each in collected if each.is_success is None), None):
        raise DataError(
            f"{unknown.name} does not say whether it succeeded, which values are learnt from; record "
            "episodes with eval_libero --record-to."
        )
    returns = [torch.from_numpy(each) for each in _compute_returns(episodes, labels)]
    lengths = torch.tensor([each.num_steps for each in episodes])
    of_episode = torch.arange(len(episodes)).repeat_interleave(lengths)
    features = await _compute_features(policy, lane, episodes)
    fitted = await lane.run(
        fit_values, features, torch.cat(returns), of_episode, value, seed, work="values"
    )
    values = torch.split(fitted.values, lengths.tolist())
    scores = _score_steps(returns, values, labels)
    positive = _choose_positive(episodes, len(demonstrations), scores, labels.positive_share)
    labelled = [
        _label_episode(each, chosen) for each, chosen in zip(episodes, positive, strict=True)
    ]
    _require_readable(policy, labelled)
    lines = _describe(collected, positive[len(demonstrations) :], fitted.explained)
    return LabelledEpisodes(tuple(labelled), lines)


def labelled_batches(
    policy: "FlowPolicy", dropout: float, shift: int, draws: random.Random
) -> Callable[[Sequence[Observation]], Any]:
    """Return a `policy.prepare` that drops labels at random, and shifts images as `shifted_batches` does.

    Call it in one thread, because all batches draw from `draws`.

    Args:
        policy: the policy, which prepares.
        dropout: share of the observations that are shown without their label.
        shift: pixels by which images are moved, at most; 0: not at all.
        draws: all chance.
    """
    from vla_rl.models.flow.advantage_prompt import relabel

    prepare = shifted_batches(policy, shift, draws) if shift else policy.prepare

    def drop(observations: Sequence[Observation]) -> Any:
        return prepare(
            [relabel(each, None) if draws.random() < dropout else each for each in observations]
        )

    return drop


def seeded_labels(
    policy: "FlowPolicy", settings: Mapping[str, Any]
) -> Callable[[Sequence[Observation], int], Any]:
    """Return a function that prepares observations as `labelled_batches` does, drawing from a seed.

    Args:
        policy: the policy.
        settings: `dropout` and `shift`.
    """
    draws = random.Random()
    prepare = labelled_batches(policy, float(settings["dropout"]), int(settings["shift"]), draws)

    def seeded(observations: Sequence[Observation], seed: int) -> Any:
        draws.seed(seed)
        return prepare(observations)

    return seeded


def _compute_returns(
    episodes: Sequence[RecordedEpisode], labels: AdvantageLabelConfig
) -> list[np.ndarray]:
    from vla_rl.algorithms.off_policy import normalised_returns

    longest: dict[str, int] = {}
    for each in episodes:
        longest[each.instruction] = max(longest.get(each.instruction, 0), each.num_steps)
    return [
        normalised_returns(
            each.num_steps,
            # demonstrations that do not say so are successes; collected ones all say so
            is_success=each.is_success is not False,
            longest=longest[each.instruction],
            failure_cost=labels.failure_cost,
        )
        for each in episodes
    ]


async def _compute_features(
    policy: "FlowPolicy", lane: "DeviceLane", episodes: Sequence[RecordedEpisode]
) -> "Tensor":
    """Return the policy's features of every control step without a label, float32 [N, F], on the CPU."""
    import torch

    from vla_rl.models.flow.advantage_prompt import relabel

    def read(episode: RecordedEpisode, first: int) -> Any:
        steps = range(first, min(first + READ_TOGETHER, episode.num_steps))
        cameras = policy.config.cameras
        return policy.prepare([relabel(episode.observation(step, cameras), None) for step in steps])

    def compute(batch: Any) -> "Tensor":
        with torch.no_grad():
            return policy.features(batch).float().cpu()

    found = []
    for episode in episodes:
        for first in range(0, episode.num_steps, READ_TOGETHER):
            batch = await asyncio.to_thread(read, episode, first)
            found.append(await lane.run(compute, batch, work="features"))
    return torch.cat(found)


def _score_steps(
    returns: "Sequence[Tensor]", values: "Sequence[Tensor]", labels: AdvantageLabelConfig
) -> list[np.ndarray]:
    from vla_rl.algorithms.off_policy import n_step_advantages, smooth_advantages

    return [
        smooth_advantages(
            n_step_advantages(each.numpy(), value.numpy(), num_steps=labels.lookahead),
            decay=labels.smoothing_decay,
            window=labels.smoothing_window,
        )
        for each, value in zip(returns, values, strict=True)
    ]


def _choose_positive(
    episodes: Sequence[RecordedEpisode],
    num_demonstrations: int,
    scores: Sequence[np.ndarray],
    positive_share: float,
) -> list[np.ndarray]:
    """Label the collected steps of each task; demonstrations and an expert's steps are always positive.

    Shares are those of the collected steps: ranked among demonstrations, which are better than any, a
    policy's own best steps would never count.
    """
    from vla_rl.algorithms.off_policy import label_advantages

    always = [np.ones(each.num_steps, np.bool_) for each in episodes[:num_demonstrations]]
    collected, rated = episodes[num_demonstrations:], scores[num_demonstrations:]
    if not collected:
        return always
    numbers = {words: number for number, words in enumerate({e.instruction for e in collected})}
    tasks = [np.full(each.num_steps, numbers[each.instruction]) for each in collected]
    intervened = [
        np.zeros(each.num_steps, np.bool_) if each.intervened is None else each.intervened
        for each in collected
    ]
    positive = label_advantages(
        np.concatenate(rated),
        np.concatenate(tasks),
        np.concatenate(intervened),
        positive_share=positive_share,
    )
    ends = np.cumsum([each.num_steps for each in collected])[:-1]
    return [*always, *np.split(positive, ends)]


def _label_episode(episode: RecordedEpisode, positive: np.ndarray) -> RecordedEpisode:
    from vla_rl.models.flow.advantage_prompt import label_instruction

    words = zip(episode.step_instructions, positive.tolist(), strict=True)
    labelled = tuple(label_instruction(each, is_positive) for each, is_positive in words)
    return msgspec.structs.replace(episode, instructions=labelled)


def _require_readable(policy: "FlowPolicy", labelled: Sequence[RecordedEpisode]) -> None:
    """Raise DataError if a label makes an instruction too long for the policy."""
    seen = set[str]()
    for episode in labelled:
        if episode.instruction in seen:
            continue
        seen.add(episode.instruction)
        try:
            policy.prepare([episode.observation(0, policy.config.cameras)])
        except ValueError as error:
            raise DataError(f"{episode.name}, with its label: {error}") from error


def _describe(
    collected: Sequence[RecordedEpisode], positive: Sequence[np.ndarray], explained: float
) -> tuple[str, ...]:
    lines = [f"values explain {explained:.0%} of the variance of the returns"]
    if explained < 0.0:
        lines.append(
            "values are worse than the mean return, so labels are close to chance: collect more episodes"
        )
    shares = {
        kind: [
            chosen
            for each, chosen in zip(collected, positive, strict=True)
            if each.is_success is is_success
        ]
        for kind, is_success in (("successes", True), ("failures", False))
    }
    for kind, chosen in shares.items():
        if chosen:
            joined = np.concatenate(chosen)
            lines.append(
                f"{joined.mean():.0%} of {len(joined)} control steps of {len(chosen)} collected {kind} "
                "are positive"
            )
    return tuple(lines)
