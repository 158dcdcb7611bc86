"""A small policy whose log-probs depend on more than the observation: one noisy step of a chain.

noise ─► state before ─► + network's numbers + noise of the step = tokens ─► * 2 = the end, decoded
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from small_episodes import trajectory
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, Predictions, SampledTokens, TorchActionEngine
from vla_rl.engines.sampling import seeded_uniforms
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.rollout import EpisodePolicy, copy_chunk
from vla_rl.types import Observation, Sampling, Step, Trajectory

NUM_STEPS = 4
SHAPE = MlpConfig(
    state_size=2, action_low=(-9.0,), action_high=(9.0,), num_bins=2, chunk_size=2, hidden=(16,)
)


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


def make_drawing_policy(seed: int = 0, shape: MlpConfig = SHAPE) -> DrawingPolicy:
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
