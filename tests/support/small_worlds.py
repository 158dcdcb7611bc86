"""Worlds of a few numbers: two lamps for planners, and short episodes that always succeed beside long ones.

The lamps have a request, skills and a scene in words; the long episodes succeed only by new weights.
Simulator processes import this, so networks are imported only where they are made: torch takes 2 s of
CPU time.
"""

from typing import TYPE_CHECKING, Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.types import EnvSpec, EpisodeSpec, Info, Observation, Sampling

if TYPE_CHECKING:
    from vla_rl.models.mlp import MlpPolicy


SKILLS: Final = ("light the red lamp", "light the blue lamp")

SHORT: Final = 2
LONG: Final = 16


class LampEnv(gymnasium.Env[Observation, np.ndarray]):
    """An action of at least 0.5 lights the red lamp, one of at most -0.5 the blue one; both are asked for."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as gymnasium declares it
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
            "state": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "instruction": Words(64),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, step_limit: int = 24) -> None:
        self._step_limit = step_limit

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._lit, self._num_steps = [False, False], 0
        return self._observe(), {
            **self._info(), "request": "light both lamps", "skills": list(SKILLS),
        }  # fmt: skip

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        self._num_steps += 1
        before = sum(self._lit)
        self._lit = [self._lit[0] or action[0] >= 0.5, self._lit[1] or action[0] <= -0.5]
        reward = 0.5 * (sum(self._lit) - before)
        return (
            self._observe(), reward, False, self._num_steps >= self._step_limit, self._info(),
        )  # fmt: skip

    def _observe(self) -> Observation:
        image = np.zeros((16, 16, 3), np.uint8)
        image[:8, :, 0], image[8:, :, 2] = 255 * self._lit[0], 255 * self._lit[1]
        return {"image": image, "state": np.array(self._lit, np.float32), "instruction": "none"}

    def _info(self) -> Info:
        names = [name for name, lit in zip(("red", "blue"), self._lit, strict=True) if lit]
        return {
            "scene": [f"The {name} lamp is lit." for name in names],
            "is_success": all(self._lit),
        }


gymnasium.register("lamps-v0", entry_point=LampEnv)

LAMPS: Final = EnvSpec(id="small_worlds:lamps-v0")


class UnevenEnv(gymnasium.Env[Observation, np.ndarray]):
    """Even starts end after `SHORT` control steps with success; odd ones end after `LONG`, with
    success if all actions were 1.
    """

    observation_space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    action_space = spaces.Box(0.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._is_short = (options or {})["init_state_id"] % 2 == 0
        self._num_steps, self._all_were_one = 0, True
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        self._num_steps += 1
        self._all_were_one &= bool(action[0] > 0.5)
        ends = self._num_steps == (SHORT if self._is_short else LONG)
        is_success = ends and (self._is_short or self._all_were_one)
        return self._seen(), float(is_success), ends, False, {"is_success": is_success}

    def _seen(self) -> Observation:
        return {"state": np.array([self._num_steps / LONG, self._is_short], np.float32)}


gymnasium.register("uneven-v0", entry_point=UnevenEnv)


def starts(num: int) -> list[EpisodeSpec]:
    """The first starts, each once."""
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id="small_worlds:uneven-v0"),
            task=f"uneven/{number % 2}",
            seed=0,
            policy_seed=0,
            options={"init_state_id": number},
            sampling=Sampling(greedy=True),
        )
        for number in range(num)
    ]


def policy_that_acts(action: int) -> "MlpPolicy":
    """A policy that always chooses 0, or always 1."""
    from vla_rl.models.mlp import MlpConfig, MlpPolicy

    shape = MlpConfig(
        state_size=2, action_low=(0.0,), action_high=(1.0,), num_bins=2, chunk_size=1, hidden=(4,)
    )
    policy = MlpPolicy.create(shape, seed=0)
    tensors = {name: tensor.clone() for name, tensor in policy.checkpoint_tensors().items()}
    tensors["head.weight"].zero_()
    tensors["head.bias"].zero_()
    tensors["head.bias"][action] = 1.0
    policy.load_checkpoint_tensors(tensors)
    return policy
