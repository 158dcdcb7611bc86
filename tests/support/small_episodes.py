"""Episodes and groups of a few decisions, made up or by small policies in a world with numbers for states.

One policy is an MLP. The log-probs of the other depend on more than the observation, on one noisy step of
a chain:

noise ─► state before ─► + network's numbers + noise of the step = tokens ─► * 2 = the end, decoded
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, Predictions, SampledTokens, TorchActionEngine
from vla_rl.engines.sampling import seeded_uniforms
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.rollout import EpisodePolicy, copy_chunk
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Group,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

NUM_STEPS = 4
DRAWING_SHAPE = MlpConfig(
    state_size=2, action_low=(-9.0,), action_high=(9.0,), num_bins=2, chunk_size=2, hidden=(16,)
)


def trajectory(
    rewards: list[list[float]],
    number: int = 0,
    stop: StopReason = StopReason.TERMINATED,
    info: dict[str, Any] | None = None,
) -> Trajectory:
    """One decision for each list of rewards.

    Chunks of two control steps with one token each, of log-prob -1.
    """
    steps = tuple(
        Step(
            observation={},
            chunk=ActionChunk(
                actions=np.zeros((2, 1), np.float32),
                tokens=np.zeros(2, np.int64),
                log_probs=np.full(2, -1.0, np.float32),
                weight_version=0,
            ),
            rewards=np.array(executed, np.float32),
        )
        for executed in rewards
    )
    spec = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec, steps=steps, final_observation={}, stop_reason=stop, info=info or {}
    )


def make_group(*members: Trajectory) -> Group:
    return Group(group_id=0, trajectories=members, dispatch_version=0)


PAIR = make_group(trajectory([[1.0, 2.0], [4.0]], 0), trajectory([[0.5]], 1, StopReason.SUCCESS))


SILENT = make_group(trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.TIME_LIMIT))
"""Episodes of an environment whose infos never have `is_success`."""


def as_greedy(sampled: Trajectory) -> Trajectory:
    greedy = msgspec.structs.replace(sampled.episode.sampling, greedy=True)
    episode = msgspec.structs.replace(sampled.episode, sampling=greedy)
    return msgspec.structs.replace(sampled, episode=episode)


def shared(
    number: int, *turns: tuple[str, float], stop: StopReason = StopReason.TERMINATED
) -> Trajectory:
    """An episode of several agents: who decided, and what that earned."""
    alone = trajectory([[earned] for _, earned in turns], number, stop)
    steps = tuple(
        msgspec.structs.replace(step, agent=agent)
        for step, (agent, _) in zip(alone.steps, turns, strict=True)
    )
    return msgspec.structs.replace(alone, steps=steps)


SHARED = make_group(
    shared(0, ("solver", 0.0), ("checker", 1.0), ("solver", 1.0)),
    shared(1, ("solver", 0.0), ("checker", 0.5)),
    shared(2, ("solver", 0.5)),
)


SHAPE = MlpConfig(
    state_size=2, action_low=(-1.0,), action_high=(1.0,), num_bins=5, chunk_size=2, hidden=(16,)
)


def mlp(seed: int = 0) -> MlpPolicy:
    return MlpPolicy.create(SHAPE, seed)


def state(*numbers: float) -> Observation:
    return {"state": np.array(numbers, np.float32)}


def run_policy(
    policy: MlpPolicy,
    seed: int,
    observations: Sequence[Observation],
    stop_reason: StopReason = StopReason.TERMINATED,
    weight_version: int = 0,
) -> Trajectory:
    """What the policy chose for all but the last observation.

    Every chunk ran whole, and each decision earned 1.
    """
    seen = list(observations[:-1])
    samplings = [Sampling(seed=derive_seed(seed, index)) for index in range(len(seen))]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(seen), samplings)
        tokens, log_probs = sampled.tokens, sampled.log_probs
    actions = policy.decode(tokens.numpy())
    steps = tuple(
        Step(
            observation=observation,
            chunk=ActionChunk(
                actions=actions[index],
                tokens=tokens[index].numpy(),
                log_probs=log_probs[index].numpy(),
                weight_version=weight_version,
            ),
            rewards=np.full(policy.config.chunk_size, 1.0 / policy.config.chunk_size, np.float32),
        )
        for index, observation in enumerate(seen)
    )
    episode = EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=seed,
        env=EnvSpec(id="none"),
        task="none",
        seed=seed,
        policy_seed=seed,
    )
    return Trajectory(
        episode=episode,
        steps=steps,
        final_observation=observations[-1],
        stop_reason=stop_reason,
        info={},
    )


def walk(policy: MlpPolicy, seed: int, num_steps: int, **kinds: object) -> Trajectory:
    """A trajectory over random states."""
    rng = np.random.default_rng(seed)
    trajectory = run_policy(
        policy, seed, [state(*rng.normal(size=2)) for _ in range(num_steps + 1)]
    )
    return msgspec.structs.replace(trajectory, **kinds)


class DrawingPolicy(MlpPolicy):
    """Tokens are numbers of a normal distribution around a state that the decision has drawn."""

    token_ids: Any = None
    has_token_means = False

    def check_drawn(self, drawn: Mapping[str, np.ndarray] | None) -> None:
        if drawn is None or set(drawn) != {"state_before", "step", "mean"}:
            raise ValueError("`drawn` is missing, expected state_before, step and mean")
        if not 0 <= int(drawn["step"]) < NUM_STEPS:
            raise ValueError(f"step is {int(drawn['step'])}, expected 0 to {NUM_STEPS - 1}")

    def example_observation(self, seed: int) -> Observation:
        before = np.zeros(self.config.num_tokens, np.float32)
        drawn = {"state_before": before, "step": np.array(seed % NUM_STEPS), "mean": before}
        return {"state": np.zeros(self.config.state_size, np.float32), "drawn": drawn}

    def prepare(self, observations: Sequence[Observation]) -> Any:
        states = super().prepare(observations)
        if "drawn" not in observations[0]:
            return states, None, None, None
        drawn = [each["drawn"] for each in observations]
        before, mean = (
            torch.from_numpy(np.stack([each[name] for each in drawn]))
            for name in ("state_before", "mean")
        )
        return states, before, torch.tensor([int(each["step"]) for each in drawn]), mean

    def sample(self, batch: Any, samplings: Sequence[Sampling]) -> SampledTokens:
        for sampling in samplings:
            sampling.require_no_mean()
        uniforms = seeded_uniforms(samplings, 2 * self.config.num_tokens + 1).float()
        before, noise = uniforms[:, :-1].chunk(2, dim=1)
        steps = (uniforms[:, -1] * NUM_STEPS).long()
        mean = self._means(batch[0], before, steps)
        tokens = mean + noise - 0.5
        log_probs = self._densities(tokens, batch[0], before, steps)
        return SampledTokens(
            tokens,
            log_probs,
            {"state_before": before, "step": steps, "mean": mean},
            chunk=2.0 * tokens,
        )

    def log_probs(self, batch: Any, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self._densities(tokens, *batch[:3])
        return log_probs, torch.ones_like(log_probs)

    def predict(
        self, batch: Any, tokens: Tensor, temperatures: Tensor, predicts: str
    ) -> Predictions:
        states, before, steps, acted = batch
        mean = self._means(states, before, steps)
        scale = 1.0 if predicts == "next_state" else 2.0
        weight = scale * (1.0 + steps)[:, None]
        return Predictions(
            *self.log_probs(batch, tokens, temperatures),
            scale * mean, scale * acted, scale * tokens, torch.ones_like(weight), weight, acted,
        )  # fmt: skip

    def features(self, batch: Any) -> Tensor:
        return super().features(batch[0])

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return actions.reshape(len(actions), -1).astype(np.float32)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        grid = tokens.reshape(len(tokens), self.config.chunk_size, -1)
        return np.clip(grid, self.config.action_low, self.config.action_high).astype(np.float32)

    def copy(self) -> "DrawingPolicy":
        return DrawingPolicy(self.config, super().copy().network)

    def _means(self, states: Tensor, before: Tensor, steps: Tensor) -> Tensor:
        return before + (1 + steps)[:, None] * self._network(states)[..., 0]

    def _densities(self, tokens: Tensor, states: Tensor, before: Tensor, steps: Tensor) -> Tensor:
        return -0.5 * (tokens - self._means(states, before, steps)) ** 2


def make_drawing_policy(seed: int = 0, shape: MlpConfig = DRAWING_SHAPE) -> DrawingPolicy:
    return DrawingPolicy(shape, DrawingPolicy.create(shape, seed).network)


async def run_episodes(policy: DrawingPolicy, lane: DeviceLane) -> list[Trajectory]:
    """Three episodes of two decisions, through an engine."""
    found = []
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        for number in range(3):
            made_up = trajectory([[1.0, 1.0], [0.0, 0.0]], number)
            acting, steps = EpisodePolicy(engine, made_up.episode), []
            for index, step in enumerate(made_up.steps):
                seen = {"state": np.array([index, number], np.float32)}
                chunk = copy_chunk(await acting.act(seen, Sampling()))
                steps.append(Step(observation=seen, chunk=chunk, rewards=step.rewards))
            found.append(msgspec.structs.replace(made_up, steps=tuple(steps)))
    return found
