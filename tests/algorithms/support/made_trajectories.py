"""Trajectories made of given observations, one decision for each but the last."""

from typing import Any

import numpy as np

from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory


def trajectory_of(
    observations: list[dict[str, Any]],
    episode_id: int = 0,
    frames: list[np.ndarray | None] | None = None,
    frames_key: str | None = "image",
) -> Trajectory:
    """`frames`: for each decision the frames of `frames_key` that its step kept, uint8 [n, S, S,
    3], or None.
    """
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    kept = frames or [None] * (len(observations) - 1)
    steps = tuple(
        Step(
            observation=seen,
            chunk=chunk,
            rewards=np.zeros(1, np.float32),
            frames=of_step,
            frames_key=frames_key,
        )
        for seen, of_step in zip(observations[:-1], kept, strict=True)
    )
    spec = EpisodeSpec(
        episode_id=episode_id,
        group_id=0,
        member=0,
        env=EnvSpec(id="toy"),
        task="t",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec,
        steps=steps,
        final_observation=observations[-1],
        stop_reason=StopReason.TIME_LIMIT,
    )


def with_states(*states: float, episode_id: int = 0) -> Trajectory:
    """One number as the state of every observation."""
    return trajectory_of([{"state": np.array([s], np.float32)} for s in states], episode_id)


def with_frames(num: int, size: int = 24, seed: int = 0, episode_id: int = 0) -> Trajectory:
    """Random images of `size` pixels, as many as observations."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    return trajectory_of([{"image": frame} for frame in frames], episode_id)
