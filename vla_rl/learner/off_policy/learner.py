"""The off-policy learner: it stores every episode, and trains a head from all that is stored.

    trajectories ─► rows ─► segment, synced ─► gradient steps ─► publication
                    (final states of cut-off    (one job of the device lane each; acting goes on
                     episodes: device lane)      between them; rows are drawn ahead, beside the lane)

The engine acts with a copy of the head, and gets the new one with the last job of an update, so that no
decision is made between two versions. Rows of gradient step n depend on the seed, on n and on what the
buffer holds, and noise on the seed and n: a run that is resumed goes on as if it had not stopped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane, to_host
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.learner import UpdateReport
from vla_rl.learner.off_policy.batches import StepRows, make_batch, make_step_rows
from vla_rl.learner.off_policy.calibration import Calibration
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.learner.off_policy.sampling import RowSampler
from vla_rl.learner.off_policy.steps import take_step
from vla_rl.learner.off_policy.training import HeadTraining
from vla_rl.learner.rows import Advantage
from vla_rl.replay import EpisodeRows, make_rows
from vla_rl.types import Observation, Trajectory, derive_seed
from vla_rl.util.stalls import note_progress
from vla_rl.util.tasks import run_in_thread

MAXIMA: Final = ("critic/q_max",)
"""Metrics whose largest value over the steps counts, and not their mean."""


class MetricSums:
    """Sums over gradient steps."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._versions = 0.0
        self.num_steps = 0
        """Gradient steps that were added."""

    def add(self, metrics: Mapping[str, Tensor | float], mean_version: float) -> None:
        """Add a step.

        Args:
            metrics: by path, float32 [] on the device, or numbers of the host.
            mean_version: mean weight version of its rows.
        """
        self.num_steps += 1
        self._versions += mean_version
        for name, value in metrics.items():
            self._counts[name] = self._counts.get(name, 0) + 1
            if not isinstance(value, Tensor):
                self._numbers[name] = self._numbers.get(name, 0.0) + value
                continue
            before = self._sums.get(name)
            if before is None:
                self._sums[name] = value
            else:
                self._sums[name] = (
                    torch.maximum(before, value) if name in MAXIMA else before + value
                )

    def read(self, weight_version: int) -> dict[str, float]:
        """Copy the means to the host, in one copy; on the lane.

        Args:
            weight_version: version of the head after the update, from which ages are counted.
        """
        if not self.num_steps:
            return {}
        # steps that found no success or label yet have no value
        sums = [each.float() for each in self._sums.values()]
        values = to_host(torch.stack(sums))[0].tolist() if sums else []
        found = {
            name: value if name in MAXIMA else value / self._counts[name]
            for name, value in zip(self._sums, values, strict=True)
        }
        found |= {name: value / self._counts[name] for name, value in self._numbers.items()}
        age = weight_version - self._versions / self.num_steps
        return {**found, "replay/sampled_age": age}


_log = logging.getLogger(__name__)

DescribeStates = Callable[[Sequence[Observation]], Mapping[str, np.ndarray]]
"""Returns the features, proprioception and base's action of observations, by name; on the lane."""

FINAL_STATES: Final = 16
"""Most final observations that one job of the lane describes, so that acting does not wait long."""


class OffPolicyLearner:
    """Trains the head of a policy from a replay buffer; updates run one after another.

    Args:
        model: the policy, whose `network` is the head.
        lane: computes with it; shared with the engines, which act with copies.
        config: algorithm, networks, batches and weights.
        replay: stores the episodes; opened by its owner before the first update.
        describe_states: describes the final observation of an episode that was cut off.
        publish_to: engines that get the head after each update.
        encode_action: turns an expert's chunk into the head's action; None: labels are left out.
        weight_version: number of updates already applied.
        seed: seed of the critics' weights, of rows and of noise.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        config: OffPolicyConfig,
        replay: RunReplay,
        describe_states: DescribeStates,
        publish_to: Sequence[WeightSink] = (),
        *,
        encode_action: Callable[[np.ndarray], np.ndarray] | None = None,
        weight_version: int = 0,
        seed: int = 0,
    ) -> None:
        self._lane, self.config = lane, config
        """Settings."""
        self.replay = replay
        """The stored episodes."""
        self._describe_states, self._encode_action = describe_states, encode_action
        self.training = HeadTraining(
            model, replay.layout, config, publish_to, weight_version, derive_seed(seed, "networks")
        )
        """Networks and optimizers."""
        self._sampler = RowSampler(replay, config, seed)
        self._noise_seed = derive_seed(seed, "noise")
        self._calibration = Calibration(config)
        self._is_warned = False
        self._turn = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self.training.weight_version

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Store episodes, make the gradient steps that they have earned, and publish the head.

        The episodes are on the disk before the first gradient step; if the update fails or is
        cancelled later, they stay stored.

        Args:
            trajectories: episodes of the run.
            advantages: rewards of each episode's decisions, float32 [decisions].
            reference_log_probs: always None.

        Raises: DataError, naming episode and decision, for rows that do not fit; DivergedError for
            repeated gradients that are not finite.
        """
        assert reference_log_probs is None, "no loss over a head has a KL term"
        started = time.perf_counter()
        async with self._turn:
            episodes = await self._make_episodes(trajectories, advantages)
            stored = await run_in_thread(self.replay.buffer.append, episodes)
            new = [episode for episode in episodes if episode.episode_id in set(stored)]
            num_rows = sum(len(episode.rows) for episode in new)
            seconds_storing = time.perf_counter() - started
            self._calibration.warn_if_out_of_range([episode.rows for episode in new])
            measured = await self._calibrate(new)
            num_steps = await self._lane.run(self._earn_steps, num_rows, work="update")
            report = await self._learn(num_steps)
        return UpdateReport(
            self.weight_version,
            {
                **report,
                **measured,
                "update/decisions": float(num_rows),
                "update/seconds": time.perf_counter() - started,
                "update/storing_s": seconds_storing,
                "off_policy/updates_per_decision": num_steps / max(num_rows, 1),
            },
        )

    async def learn_steps(self, num_steps: int) -> UpdateReport:
        """Make gradient steps without new episodes, and publish the head."""
        started = time.perf_counter()
        async with self._turn:
            report = await self._learn(num_steps)
        report["update/seconds"] = time.perf_counter() - started
        return UpdateReport(self.weight_version, report)

    def count_flops(self, peak_flops: float) -> None:
        """Do nothing: the run measures what its own device lane computes."""

    async def publish_unchanged(self) -> UpdateReport:
        """Publish the same head as a new version."""
        async with self._turn:
            await self._lane.run(self.training.publish, work="update")
        return UpdateReport(self.weight_version, {"update/trained": 0.0})

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on, but for the buffer's, between two updates."""
        async with self._turn:
            return await self._lane.run(self.training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it.

        Raises: CheckpointError if it is of another policy or algorithm.
        """
        async with self._turn:
            await self._lane.run(self.training.restore, state, work="checkpoint")

    async def _make_episodes(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[Advantage]
    ) -> list[EpisodeRows]:
        """Return the rows of trajectories; the final observations of cut-off ones are described."""
        cut_off = [each for each in trajectories if each.stop_reason.is_cut_off]
        final: dict[int, dict[str, np.ndarray]] = {}
        for first in range(0, len(cut_off), FINAL_STATES):
            part = cut_off[first : first + FINAL_STATES]
            observations = [each.final_observation for each in part]
            found = await self._lane.run(self._describe_states, observations, work="update")
            for row, trajectory in enumerate(part):
                state = {name: values[row] for name, values in found.items()}
                final[trajectory.episode.episode_id] = state

        def make_all() -> list[EpisodeRows]:
            return [
                make_rows(
                    trajectory,
                    self.replay.layout,
                    final.get(trajectory.episode.episode_id),
                    rewards=np.asarray(reward, np.float32),
                    encode_action=self._encode_action,
                )
                for trajectory, reward in zip(trajectories, rewards, strict=True)
            ]

        return await self._lane.prepare(make_all)

    async def _calibrate(self, episodes: Sequence[EpisodeRows]) -> dict[str, float]:
        """Compare the critic's values of new episodes with what they earned, before it sees them."""
        if not (self.training.has_values and episodes and self.training.num_steps):
            return {}
        rows = np.concatenate([episode.rows for episode in episodes])
        make = partial(make_batch, rows, self.replay.layout, self.config, self.training.device)
        batch = await self._lane.prepare(make)
        values = await self._lane.run(self.training.value_rows, batch, work="update")
        return self._calibration.compare(rows, values)

    def _earn_steps(self, num_rows: int) -> int:
        """Count new rows, and return the gradient steps of this update."""
        training, config = self.training, self.config
        training.num_rows += num_rows
        # rows that come before the first gradient step earn none: a thousand steps at once would
        # fit the head to a few episodes
        if self.replay.buffer.num_rows < config.first_rows:
            return 0
        training.owed_steps += num_rows * config.steps_per_decision
        num_steps = min(int(training.owed_steps), config.max_steps)
        training.owed_steps -= num_steps
        return num_steps

    async def _learn(self, num_steps: int) -> dict[str, float]:
        """Make gradient steps and publish the head; return metrics."""
        training = self.training
        sums = MetricSums()
        first = training.num_steps
        steps = list(range(first, first + num_steps))
        async with aclosing(self._lane.prepare_ahead(self._draw_rows, steps)) as drawn:
            async for step, rows in drawn:
                if rows is None:
                    break
                seed = derive_seed(self._noise_seed, step)
                found = await self._lane.run(take_step, training, rows, seed, work="update")
                sums.add(found, float(rows.critic.versions.mean()))
                note_progress("gradient steps")
        await self._lane.run(training.publish, work="update")
        if num_steps and not sums.num_steps and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "no gradient step is made, because the replay buffer has no row to imitate yet; %s",
                self._describe_wanted(),
            )
        metrics = await self._lane.run(sums.read, self.weight_version, work="update")
        self._calibration.warn_if_impossible(metrics)
        return {
            **metrics,
            **self.replay.buffer.metrics(self.weight_version),
            "update/trained": float(sums.num_steps > 0),
            "off_policy/steps": float(training.num_steps),
            "off_policy/owed_steps": training.owed_steps,
        }

    def require_rows(self) -> None:
        """Raise ConfigError if the buffer has no row to learn from; call it where none comes later."""
        if self._sampler.has_nothing_to_imitate:
            raise ConfigError(
                f"none of {self.replay.buffer.num_episodes} stored episodes has a row to learn from: "
                f"{self._describe_wanted()}; name other episodes, or choose another algorithm"
            )

    def _describe_wanted(self) -> str:
        wanted = " or ".join(self._sampler.wanted_by_actor)
        return f"off_policy.algorithm is {self.config.algorithm!r}, which imitates rows that are {wanted}"

    def _draw_rows(self, step: int) -> StepRows | None:
        """Draw the rows of a gradient step; None if nothing would be learnt. Runs beside the lane."""
        rows = self._sampler.draw_critic_rows(step)
        # without a critic, a step that finds nothing to imitate would count and move no weight
        if rows is None or self._sampler.has_nothing_to_imitate:
            return None
        own = self._sampler.draw_actor_rows(step)
        return make_step_rows(
            rows,
            own,
            layout=self.replay.layout,
            config=self.config,
            device=self.training.device,
            has_own=self._sampler.has_actor_rows,
        )
