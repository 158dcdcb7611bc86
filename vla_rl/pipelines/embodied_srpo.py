"""SRPO: embed each group as it completes, reward all groups together, and make one update.

    rollout ─► embed ─┐
       │              ▼
       ├──────────► reward ─► advantage ─► update ─► checkpoint
       │                                     ▲
       ├─────────────────────────────────────┘
       └─► videos

Fei et al. 2025, "SRPO: Self-Referential Policy Optimization for Vision-Language-Action Models",
arXiv:2511.15605. A failure is rewarded by how near its trajectory came to the successes of the same
task in the same update; advantages are group-relative, and the loss is the clipped surrogate. Nodes
can be replaced or inserted: `docs/graph.md`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vla_rl import engines
from vla_rl.algorithms import BankedTask, ReferenceBank, SrpoConfig, TrajectoryEncoder, srpo_rewards
from vla_rl.errors import ConfigError
from vla_rl.graph import NodeOutput, Pipeline
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.pipelines.embodied_grpo import embodied_grpo
from vla_rl.pipelines.nodes.advantages import all_trajectories
from vla_rl.pipelines.nodes.rewards import (
    RewardConfig,
    require_known_success,
    rewards_by_group,
    score_metrics,
)
from vla_rl.pipelines.parts import Parts
from vla_rl.types import Group

READS: Final = ("embedding", "srpo", "run.videos_every")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "seq_mean_token_mean",
    },
}


def embodied_srpo(parts: Parts) -> Pipeline:
    """Build the pipeline of one update.

    Raises: ConfigError if the configuration has no settings for the embedding of videos, or has
    another reward.
    """
    config = parts.config
    if not isinstance(config, EmbodiedConfig):
        raise ConfigError(
            f"pipeline 'embodied_srpo' got a {type(config).__name__}, expected an EmbodiedConfig "
            "(vla_rl.pipelines.config), which has the settings for the embedding of videos."
        )
    if isinstance(parts.model, engines.LanguageModel):
        raise ConfigError(
            "pipeline 'embodied_srpo' got a language policy, expected one that sees "
            "images; use grpo."
        )
    # silently replacing somebody's reward would train for hours towards another goal
    if config.reward != RewardConfig():
        raise ConfigError(
            f"reward.function is {config.reward.function!r} and reward.manager "
            f"{config.reward.manager!r}, but pipeline 'embodied_srpo' makes its own reward of "
            "successes and distances; leave them unset, or use embodied_grpo."
        )
    encoder = parts.trajectory_encoder(config.embedding)
    by_group = config.srpo.references == "group"
    bank = ReferenceBank(0 if by_group else config.srpo.carry_over)
    # checkpoints hold it: without the successes of earlier updates a resumed run would reward
    # failures otherwise than the first one
    parts.remember("references", bank, dict[str, BankedTask])
    return (
        embodied_grpo(parts, "embodied_srpo", "SRPO for vision-language-action policies")
        .add_node(
            "embed",
            embed_group,
            reads={"group": "groups"},
            writes="embeddings",
            stream=True,
            config={"encoder": encoder},
        )
        .replace_node(
            "reward",
            reward_by_progress,
            reads=("update", "groups", "embeddings"),
            stream=False,
            config={"config": config.srpo, "bank": bank},
        )
    )


async def embed_group(group: Group, encoder: TrajectoryEncoder) -> np.ndarray:
    """Embed each trajectory by its frames or states: float32 [G, T, D].

    Those that a host has embedded stay as they are.
    """
    members = group.trajectories
    # hosts that run episodes embed them where their images are, which saves the images' way here
    missing = [member for member in members if member.embedding is None]
    made = iter(await encoder.embed(missing) if missing else ())
    return np.stack([next(made) if each.embedding is None else each.embedding for each in members])


async def reward_by_progress(
    update: int,
    groups: Sequence[Group],
    embeddings: Sequence[np.ndarray],
    config: SrpoConfig,
    bank: ReferenceBank,
) -> NodeOutput:
    """Reward 1 for a success, and progress towards the successes for a failure.

    Return `DecisionRewards` for each episode of each group.

    Raises: EnvError if an environment does not report success.
    """
    for group in groups:
        require_known_success(group, "pipeline 'embodied_srpo' compares failures with successes")
    trajectories = all_trajectories(groups)
    is_success = np.array([trajectory.is_success for trajectory in trajectories])
    by_group = config.references == "group"
    compared = [
        str(group.group_id) if by_group else member.episode.task
        for group in groups
        for member in group.trajectories
    ]
    vectors = np.concatenate(embeddings)
    carried = bank.references(compared, is_success)
    rewards = await asyncio.to_thread(
        srpo_rewards,
        vectors,
        is_success,
        compared,
        config,
        episode_ids=[trajectory.episode.episode_id for trajectory in trajectories],
        carried=carried,
    )
    bank.add_successes(update, vectors, is_success, compared)
    failures = rewards[~is_success]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/success_rate": float(is_success.mean()),
        "reward/tasks_from_bank": float(len(carried)),
        **bank.metrics(update),
        **score_metrics(trajectories),
    }
    if len(failures):
        metrics |= {
            "reward/failures_mean": float(failures.mean()),
            "reward/failures_max": float(failures.max()),
        }
    return NodeOutput(rewards_by_group(groups, rewards), metrics=metrics)
