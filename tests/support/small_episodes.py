"""Episodes and groups of a few decisions, for tests of nodes."""

from typing import Any

import msgspec
import numpy as np

from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Group, Step, StopReason, Trajectory


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


def group_of(*members: Trajectory) -> Group:
    return Group(group_id=0, trajectories=members, dispatch_version=0)


PAIR = group_of(trajectory([[1.0, 2.0], [4.0]], 0), trajectory([[0.5]], 1, StopReason.SUCCESS))


SILENT = group_of(trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.TIME_LIMIT))
"""Episodes of an environment whose infos never have `is_success`."""


def played_greedily(played: Trajectory) -> Trajectory:
    greedy = msgspec.structs.replace(played.episode.sampling, greedy=True)
    episode = msgspec.structs.replace(played.episode, sampling=greedy)
    return msgspec.structs.replace(played, episode=episode)


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


SHARED = group_of(
    shared(0, ("solver", 0.0), ("checker", 1.0), ("solver", 1.0)),
    shared(1, ("solver", 0.0), ("checker", 0.5)),
    shared(2, ("solver", 0.5)),
)
