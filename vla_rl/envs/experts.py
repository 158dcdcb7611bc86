"""Scripted experts of manipulation tasks, as suggestions to a policy or as recorded demonstrations.

The environment suggests what the expert would do: the hidden state stays in the environment's process, and only
actions leave it. One control step is suggested by a program that follows the episode, and is right as long as the
expert alone acts. Where a policy acts, as in DAgger (Ross et al. 2011, arXiv:1011.0686), whole chunks are planned
from the state that it has reached (`expert_rows`).

A demonstration holds observations and right actions. With noise, the executed action differs from
the recorded one, so that demonstrations also show how to recover.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

from vla_rl.envs.image_env import ImageEnv, require_at_least
from vla_rl.types import ActionChunk, Info, Observation, Sampling
from vla_rl.util.atomic_files import replacing


class ExpertSuggestions(gymnasium.Wrapper[Observation, np.ndarray, Observation, np.ndarray]):
    """An environment whose observations have the scripted expert's action.

    It is `expert_action`: float32 [D], or [K, D] with K = `expert_rows`. K control steps are planned anew for
    each observation with new images: the simulation runs them and is put back, so that they are what the
    expert would do from there, also where a policy acted before. They count in no `num_steps`; `planned_steps` of
    the info is their number in the episode.

    Args:
        env: the environment.
        expert_rows: K; None for one control step of an expert that follows the episode, which is right as long
            as the expert alone acts.
    """

    reads_images: ClassVar[bool] = False
    """So that the images between two decisions need not be drawn."""

    def __init__(self, env: ImageEnv[Any], expert_rows: int | None = None) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        space = env.action_space
        assert isinstance(space, spaces.Box)
        self._rows = expert_rows
        if expert_rows is not None:
            require_at_least("expert_rows", expert_rows, 1)
            space = spaces.Box(-1.0, 1.0, (expert_rows, *space.shape), np.float32)
        self.observation_space = spaces.Dict(
            {**env.observation_space.spaces, "expert_action": space}
        )
        self._images = env
        self._num_planned = 0
        self._planned = np.zeros(space.shape, np.float32)
        # Made in the environment's process, the only one with the hidden state.
        self._expert = env.make_expert()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode, and let the expert plan anew."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._expert.start_over()
        self._num_planned = 0
        suggestion = self._suggest()
        return {**observation, "expert_action": suggestion}, self._complete(info)

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        suggestion = self._suggest()
        return (
            {**observation, "expert_action": suggestion},
            float(reward),
            terminated,
            truncated,
            self._complete(info),
        )

    def _complete(self, info: Info) -> Info:
        return info if self._rows is None else {**info, "planned_steps": self._num_planned}

    def _suggest(self) -> np.ndarray:
        if self._rows is None:
            return self._expert.act()
        # inside a chunk nobody reads it, as nobody reads the images
        if self._images.render_every_step:
            self._planned = self._plan(self._rows)
        return self._planned

    def _plan(self, num_rows: int) -> np.ndarray:
        """Return what the expert would do in the next control steps, float32 [K, D]; nothing is moved by it."""
        scene = self._images.scene
        before = scene.get_state()
        self._expert.start_midway()
        rows: list[np.ndarray] = []
        for _ in range(num_rows):
            rows.append(np.clip(self._expert.act(), -1.0, 1.0))
            self._num_planned += 1
            if scene.run_control_step(rows[-1].astype(np.float64)):
                # behind the end of an episode its last row is as good as any
                rows += [rows[-1]] * (num_rows - len(rows))
                break
        scene.set_state(before)
        return np.stack(rows).astype(np.float32)


class ExpertPolicy:
    """Follows the suggestions, as many control steps at a time as there are.

    The environments have to provide them.
    """

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Return the suggested control steps as a chunk, without tokens.

        Nothing is sampled.

        Raises: `ValueError` if the observation has no suggestion.
        """
        suggestion = observation.get("expert_action")
        if not isinstance(suggestion, np.ndarray):
            raise ValueError(
                f"the observation has {sorted(observation)}, expected expert_action; "
                "use an environment with suggestions, such as vla_rl/libero_object-expert-v0."
            )
        # An expert has no distribution: without tokens and log-probs, no loss can take its actions
        # for a policy's own.
        empty = np.empty(0)
        return ActionChunk(
            actions=np.atleast_2d(suggestion).astype(np.float32),
            tokens=empty.astype(np.int64),
            log_probs=empty.astype(np.float32),
            weight_version=0,
        )


# White noise averages out before it moves the hand; a push has to last some steps.
_MEMORY = 0.7
_SIX_SHARES = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3)
"""Shares of three translations and three rotations."""


class Demonstration(msgspec.Struct, frozen=True):
    """One episode of T control steps, up to the step that reached the goal or the limit.

    Example:
        Demonstration(observations={"image": uint8 [86, 84, 84, 3], "state": float32 [86, 8]},
            actions=float32 [86, 7], executed_actions=float32 [86, 7],
            instruction="pick up the cream cheese and place it in the basket", task="libero_object/1",
            init_state_id=7, settings={"scene_seed": 0, "physics": "fast"}, is_success=True)
    """

    observations: dict[str, np.ndarray]
    """`image` (and `wrist_image`) uint8 [T, S, S, 3] and `state` float32 [T, D], before each
    action."""

    actions: np.ndarray
    """float32 [T, A], the expert's actions."""

    executed_actions: np.ndarray
    """float32 [T, A], the executed actions: the expert's plus noise."""

    instruction: str
    task: str
    init_state_id: int
    settings: dict[str, Any]
    """Settings of the environment, such as LIBERO's `scene_seed` and `physics`, one array each in
    the file; with the start and the executed actions they reproduce the episode."""

    is_success: bool

    obstacle: str | None = None
    """Reason why the expert stood still at the end of a failed episode, if known; not saved."""

    def write_npz(self, path: Path) -> None:
        """Write a compressed `.npz` without any pickled object; it appears whole or not at all."""
        arrays: dict[str, Any] = {
            **self.observations,
            "action": self.actions,
            "executed_action": self.executed_actions,
            "instruction": np.array(self.instruction),
            "task": np.array(self.task),
            "init_state_id": np.array(self.init_state_id),
            **{name: np.array(value) for name, value in self.settings.items()},
            "is_success": np.array(self.is_success),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path, path.with_name(f".{path.name}.{os.getpid()}.part")) as part,
            part.open("wb") as file,
        ):
            np.savez_compressed(file, allow_pickle=False, **arrays)


class CorrelatedNoise:
    """First-order noise on the displacement commands: each value keeps 0.7 of the one before.

    Args:
        scale: size of the noise, in units of a full command.
        rng: random generator.
        shares: part of `scale` that each displacement gets.
    """

    def __init__(
        self, scale: float, rng: np.random.Generator, shares: Sequence[float] = _SIX_SHARES
    ) -> None:
        if not 0.0 <= scale <= 1.0:
            raise ValueError(f"noise is {scale}, expected 0 to 1 (a full command).")
        self._scale = scale * np.array(shares)
        self._rng, self._value = rng, np.zeros(len(shares))

    def perturbed(self, action: np.ndarray) -> np.ndarray:
        """Return `action` plus the next noise, clipped to [-1, 1].

        The gripper keeps its command.
        """
        self._value = _MEMORY * self._value + _MEMORY * self._scale * self._rng.standard_normal(
            len(self._scale)
        )
        # The gripper's command is a sign. Noise could only flip it, which drops the object.
        noisy = action + np.append(self._value, 0.0)
        return np.asarray(np.clip(noisy, -1.0, 1.0), np.float32)


def record_demonstration(
    env: ImageEnv[Any], init_state_id: int, noise: float = 0.0, seed: int = 0
) -> Demonstration:
    """Run the expert for one episode of `env` from an initial state; `seed` fixes the noise."""
    observation, info = env.reset(options={"init_state_id": init_state_id})
    expert = env.make_expert()
    disturbance = CorrelatedNoise(noise, np.random.default_rng(seed), env.displacements)
    seen: list[dict[str, np.ndarray]] = []
    actions, executed = [], []
    terminated = truncated = False
    while not (terminated or truncated):
        seen.append(
            {name: value for name, value in observation.items() if isinstance(value, np.ndarray)}
        )
        # The label is the expert's action, and the noisy one is executed: so a demonstration also
        # shows the way back from states that the expert alone never reaches (DART, Laskey et al.
        # 2017, arXiv:1703.09327).
        actions.append(expert.act())
        executed.append(disturbance.perturbed(actions[-1]))
        observation, _, terminated, truncated, _ = env.step(executed[-1])
    return Demonstration(
        observations={name: np.stack([step[name] for step in seen]) for name in seen[0]},
        actions=np.stack(actions),
        executed_actions=np.stack(executed),
        instruction=env.task.instruction,
        task=env.task.key,
        init_state_id=init_state_id,
        settings={
            name: info[name] for name in (*env.recorded_in_states, "after_task") if name in info
        },
        is_success=terminated,
        obstacle=expert.obstacle,
    )
