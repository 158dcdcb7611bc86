"""Trajectories to watch."""

from collections.abc import Callable

import numpy as np
import pytest

from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """Make a trajectory of one-step chunks whose frames get brighter."""

    def make(
        episode_id: int = 0,
        *,
        task: str = "libero_goal/3",
        is_success: bool = True,
        num_steps: int = 4,
        size: int = 32,
        instruction: str = "open the drawer",
        key: str = "image",
        reward: float = 0.0,
        is_evaluated: bool = True,
    ) -> Trajectory:
        chunk = ActionChunk(
            actions=np.zeros((1, 7), np.float32),
            tokens=np.zeros(7, np.int64),
            log_probs=np.zeros(7, np.float32),
            weight_version=0,
        )

        def observation(number: int) -> dict[str, object]:
            level = 250 * number // max(num_steps, 1)
            return {key: np.full((size, size, 3), level, np.uint8), "instruction": instruction}

        return Trajectory(
            episode=EpisodeSpec(
                episode_id=episode_id,
                group_id=0,
                member=0,
                env=EnvSpec(id="toy"),
                task=task,
                seed=0,
                policy_seed=0,
            ),
            steps=tuple(
                Step(
                    observation=observation(number),
                    chunk=chunk,
                    rewards=np.full(1, reward, np.float32),
                )
                for number in range(num_steps)
            ),
            final_observation=observation(num_steps),
            stop_reason=StopReason.SUCCESS if is_success else StopReason.TIME_LIMIT,
            info={"is_success": is_success} if is_evaluated else {},
        )

    return make
