"""SRPO's graph: groups stream in, are embedded as they come, rewarded together, and become one update.

    rollout ─► embed ─┐
       │              ▼
       ├──────────► reward ─► advantage ─► update ─► checkpoint
       │                                     ▲
       ├─────────────────────────────────────┘
       └─► videos

Fei et al. 2025, "SRPO: Self-Referential Policy Optimization for Vision-Language-Action Models", arXiv:2511.15605. A failure
is rewarded by how near its trajectory came to the successes of the same task in the same update; group-relative
advantages and the clipped surrogate do the rest. Any node can be replaced, or another inserted: `docs/graph.md`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from vla_rl.algorithms import EmbeddingConfig, SrpoConfig, group_advantage, srpo_rewards, trajectory_embeddings
from vla_rl.graph import NodeOutput, NodeRole, NodeType, Pipeline
from vla_rl.types import Group, Trajectory


def embodied_srpo(
    *,
    collect: Callable[[int], AsyncIterator[Group]],
    learn: Callable[..., Awaitable[Any]],
    save: Callable[..., Awaitable[Any]],
    show: Callable[..., Awaitable[Any]],
    embedding: EmbeddingConfig,
    srpo: SrpoConfig,
) -> Pipeline:
    """The pipeline of one update.

    Args:
        collect: `collect(update)` gives the groups of an update as they complete.
        learn: `await learn(groups, advantages)` updates the weights and gives what a checkpoint needs, or None.
        save: `await save(snapshot)` writes a checkpoint, beside the next rollout.
        show: `await show(update, groups)` picks episodes for videos.
        embedding: how a trajectory becomes a vector.
        srpo: how distances between vectors become rewards.
    """
    return (
        Pipeline("embodied_srpo", "SRPO for vision-language-action policies", inputs="update")
        .add_node(
            "rollout",
            collect,
            reads="update",
            writes="groups",
            node_type=NodeType.ENV_INTERACT,
            node_role=NodeRole.ROLLOUT,
        )
        .add_node(
            "embed", embed_group, reads={"group": "groups"}, writes="embeddings", stream=True, config={"how": embedding}
        )
        .add_node(
            "reward",
            reward_by_progress,
            reads=("groups", "embeddings"),
            writes="rewards",
            node_role=NodeRole.REWARD,
            config={"config": srpo},
        )
        .add_node(
            "advantage", advantages_of, reads=("groups", "rewards"), writes="advantages", node_role=NodeRole.ADVANTAGE
        )
        .add_node(
            "update",
            learn,
            reads=("groups", "advantages"),
            writes="snapshot",
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
            resources="device",
        )
        .add_node("checkpoint", save, reads="snapshot")
        .add_node("videos", show, reads=("update", "groups"))
    )


async def embed_group(group: Group, how: EmbeddingConfig) -> np.ndarray:
    """float32 [G, D]: each trajectory by its own frames or states."""
    return await asyncio.to_thread(trajectory_embeddings, group.trajectories, how)


async def reward_by_progress(
    groups: Sequence[Group], embeddings: Sequence[np.ndarray], config: SrpoConfig
) -> NodeOutput:
    """float32 [N] over all trajectories of the update: 1 for a success, progress towards the successes for a failure."""
    trajectories = members_of(groups)
    is_success = np.array([trajectory.is_success for trajectory in trajectories])
    rewards = await asyncio.to_thread(
        srpo_rewards,
        np.concatenate(embeddings),
        is_success,
        [trajectory.episode.task for trajectory in trajectories],
        config,
        episode_ids=[trajectory.episode.episode_id for trajectory in trajectories],
    )
    failures = rewards[~is_success]
    metrics = {"reward/mean": float(rewards.mean()), "reward/successes": float(is_success.sum())}
    if len(failures):
        metrics |= {"reward/failures_mean": float(failures.mean()), "reward/failures_max": float(failures.max())}
    return NodeOutput(rewards, metrics=metrics)


async def advantages_of(groups: Sequence[Group], rewards: np.ndarray) -> NodeOutput:
    """float32 [N]: each reward against its own group's mean, in its group's standard deviations."""
    ends = np.cumsum([len(group.trajectories) for group in groups])
    advantages = np.concatenate([group_advantage(of_group) for of_group in np.split(rewards, ends[:-1])])
    informative = sum(bool(np.ptp(of_group) > 0) for of_group in np.split(rewards, ends[:-1]))
    return NodeOutput(advantages, metrics={"advantage/groups_that_teach": informative / len(groups)})


def members_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories, group by group."""
    return [trajectory for group in groups for trajectory in group.trajectories]
