"""Small episodes of a steered policy, and their rows."""

import numpy as np

from vla_rl.replay import EpisodeRows, TransitionLayout, make_rows
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

LAYOUT = TransitionLayout(
    features=3, proprio=1, action=4, horizon=2, action_dim=2, kind="residual", base_digest="ab" * 32
)
FINAL_STATE = {
    "features": np.array([7, 8, 9], np.float32),
    "proprio": np.array([6], np.float32),
    "reference": np.array([1, 2, 3, 4], np.float32),
}


def make_trajectory(
    episode_id: int = 5,
    *,
    decisions: int = 3,
    stop: StopReason = StopReason.SUCCESS,
    last: int = 2,
    version: int = 4,
    task: str = "toy/0",
) -> Trajectory:
    """Return an episode whose numbers follow from its id; the last decision has `last` control steps."""
    numbers = np.random.default_rng(episode_id)

    def draw(*shape: int) -> np.ndarray:
        return numbers.normal(size=shape).astype(np.float32)

    steps = []
    for number in range(decisions):
        is_last = number == decisions - 1
        rewards = np.zeros(last if is_last else 2, np.float32)
        if is_last:
            rewards[-1] = float(stop.is_success)
        drawn = {"features": draw(3), "proprio": draw(1), "reference": draw(4)}
        chunk = ActionChunk(
            actions=draw(2, 2),
            tokens=draw(4),
            log_probs=draw(4),
            weight_version=version,
            drawn=drawn,
        )
        steps.append(Step(observation={}, chunk=chunk, rewards=rewards))
    episode = EpisodeSpec(
        episode_id=episode_id,
        group_id=0,
        member=0,
        env=EnvSpec(id="toy"),
        task=task,
        seed=1,
        policy_seed=1,
    )
    return Trajectory(episode=episode, steps=tuple(steps), final_observation={}, stop_reason=stop)


def make_episode_rows(
    episode_id: int, *, is_success: bool = False, decisions: int = 3, layout: TransitionLayout = LAYOUT,
    version: int = 4, task: str = "toy/0",
) -> EpisodeRows:  # fmt: skip
    """Return the rows of such an episode."""
    stop = StopReason.SUCCESS if is_success else StopReason.TIME_LIMIT
    trajectory = make_trajectory(
        episode_id, decisions=decisions, stop=stop, version=version, task=task
    )
    return make_rows(trajectory, layout, FINAL_STATE)
