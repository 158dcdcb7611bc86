"""Recording the episodes of any run, every control step of them, as a LeRobotDataset.

train(config, starts, model, agent=EpisodeRecorder(LeRobotWriter(folder)).agent)
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from vla_rl.data import LeRobotWriter, RecordedEpisode
from vla_rl.rollout import owned_chunk, owned_copy, stop_reason
from vla_rl.types import Env, EpisodeSpec, Observation, Policy, Step, StopReason, Trajectory


class EpisodeRecorder:
    """Plays as `embodied_agent` does, looks after every control step instead of every chunk, and writes what was seen.

    The trajectory is the same; simulators draw more pictures, so episodes take longer. One that the data set holds already
    is played and not written again. Writing happens in a thread, one episode at a time; an episode ends when it is written.

    Args:
        writer: the data set.
    """

    def __init__(self, writer: LeRobotWriter) -> None:
        self._writer = writer
        self._turn = asyncio.Lock()

    async def agent(self, env: Env, policy: Policy) -> Trajectory:
        """Play one episode and record it."""
        observation, _ = await env.reset()
        steps: list[Step] = []
        seen: list[Observation] = [owned_copy(observation)]
        actions: list[np.ndarray] = []
        while True:
            chunk = owned_chunk(await policy.act(seen[-1]))
            before, rewards = seen[-1], []
            terminated = truncated = False
            for action in chunk.actions:
                observation, reward, terminated, truncated, info = await env.step(action)
                seen.append(owned_copy(observation))
                actions.append(action)
                rewards.append(reward)
                if terminated or truncated:
                    break
            steps.append(Step(observation=before, chunk=chunk, rewards=np.array(rewards, np.float32)))
            if terminated or truncated:
                break
        reason = stop_reason(terminated, info)
        trajectory = Trajectory(
            episode=env.episode,
            steps=tuple(steps),
            final_observation=seen.pop(),
            stop_reason=reason,
            info=owned_copy(info),
        )
        async with self._turn:
            await asyncio.to_thread(self._write, trajectory, seen, actions)
        return trajectory

    def _write(self, trajectory: Trajectory, seen: Sequence[Observation], actions: Sequence[np.ndarray]) -> None:
        episode = recorded_episode(trajectory, seen, actions)
        if episode.name not in self._writer.names:
            self._writer.add(episode)


def recorded_episode(
    trajectory: Trajectory, seen: Sequence[Observation], actions: Sequence[np.ndarray]
) -> RecordedEpisode:
    """An episode with what was seen before each of its control steps.

    Args:
        trajectory: what is known of it.
        seen: observations, one for each control step; pictures and vectors of them are kept.
        actions: [D] each.
    """
    first = seen[0]
    is_picture = {
        key: isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3
        for key, value in first.items()
    }
    vectors = [
        key
        for key, value in first.items()
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 1
    ]
    episode = trajectory.episode
    return RecordedEpisode(
        name=episode_name(episode),
        instruction=str(first.get("instruction", episode.task)),
        actions=np.stack(actions).astype(np.float32),
        vectors={key: np.stack([step[key] for step in seen]).astype(np.float32) for key in vectors},
        frames={key: partial(_picture, seen, key) for key, yes in is_picture.items() if yes},
        rewards=np.concatenate([step.rewards for step in trajectory.steps]),
        is_success=trajectory.stop_reason is StopReason.SUCCESS,
        about={
            "task": episode.task,
            "options": msgspec.json.encode(episode.options).decode(),
            "policy_seed": episode.policy_seed,
            "weight_version": trajectory.oldest_version,
        },
    )


def _picture(seen: Sequence[Observation], key: str, step: int) -> np.ndarray:
    return np.asarray(seen[step][key])


def episode_name(episode: EpisodeSpec) -> str:
    """The same for the same episode in another run of the same seed, such as after a resume."""
    options = " ".join(f"{key} {value}" for key, value in sorted(episode.options.items()))
    scene = f" scene {episode.env.kwargs['scene_seed']}" if "scene_seed" in episode.env.kwargs else ""
    return f"{episode.task} {options}{scene} seed {episode.policy_seed}"
