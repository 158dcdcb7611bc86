"""Settings and steps of reinforcement learning on the driving world: scenes, base policy, held-out
scenes, training.

`grpo_driving` is this with its pipeline and length.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Final, Literal

from vla_rl.commands.command_line import Command, TrainingLaunch
from vla_rl.commands.launching import launch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.evaluation import within_range
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.scored import ScoreJudge
from vla_rl.learning import LearnerConfig, OptimizerConfig
from vla_rl.models.loading import ASSETS, CheckpointFormat, described, load_policy
from vla_rl.nodes.rewards import RewardConfig
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.rollout import SchedulerConfig, TaskStart, embodied_agent
from vla_rl.simulation import SimulatorConfig
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, derive_seed

DRIVING: Final = "vla_rl/driving-v0"
DRIVING_BASE: Final = ASSETS / "driving_base"
"""A small policy that half learnt to drive; `sft_driving` makes it."""

IMAGE_SIZE: Final = 56


class HeldOutScenesConfig(HeldOutSchedule, frozen=True, kw_only=True):
    """Scenes of the held-out split, driven greedily before the first update and after the last, and
    beside training every few updates if wanted.
    """

    scenes: int = 500
    """Number of scenes, from number 0 on. 0: no held-out scenes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.scenes >= 0, "scenes", "at least 0")

    def unread(self) -> Mapping[str, str]:
        """Return all other options if there are no scenes, else those of the schedule."""
        if self.scenes > 0:
            return super().unread()
        others = [name for name in self.__struct_fields__ if name != "scenes"]
        return dict.fromkeys(others, "held_out.scenes is 0")


class DrivingConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning on the driving world; the defaults are for the small shipped
    policy.
    """

    group_size: int = 8
    temperature: float = 1.0
    """Sampling temperature for rollout and training, above 0. Higher explores further from the
    greedy trajectory, which the held-out scenes use."""

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=8, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10), minibatch_trajectories=16
    )
    reward: RewardConfig = RewardConfig(function="environment")

    scenes: int = 2000
    """Training scenes, from number 0 on."""

    version: Literal["pdms_v1", "epdms_v2"] = "epdms_v2"
    """Version of the score that trajectories are graded by."""

    reward_of: str = "total"
    """total, or one sub-score, such as ego_progress, which is the reward instead. The held-out
    scenes report all of them either way."""

    policy: str = str(DRIVING_BASE)
    """Folder of the OpenVLA-OFT checkpoint to start from."""

    held_out: HeldOutScenesConfig = HeldOutScenesConfig()

    simulators: SimulatorConfig = SimulatorConfig(num_envs=2 * (os.cpu_count() or 1))
    """Processes that draw and grade scenes; two for each core by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.scenes >= 1, "scenes", "at least 1")


def env_of(config: DrivingConfig, split: str) -> EnvSpec:
    """Return the specification of the environment over one split."""
    kwargs = {
        "split": split,
        "version": config.version,
        "reward": config.reward_of,
        "image_size": IMAGE_SIZE,
    }
    return EnvSpec(id=DRIVING, kwargs=kwargs)


def starts_of(config: DrivingConfig) -> list[TaskStart]:
    """Return the training scenes."""
    env = env_of(config, "train")
    return [
        TaskStart(env=env, task="driving", options={"init_state_id": number})
        for number in range(config.scenes)
    ]


def held_out_episodes(config: DrivingConfig) -> list[EpisodeSpec]:
    """Return every held-out scene, once."""
    env = env_of(config, "held_out")
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=env,
            task="driving",
            options={"init_state_id": number},
            sampling=Sampling(greedy=True, temperature=config.temperature),
            seed=0,
            policy_seed=derive_seed(config.run.seed, "held out", number),
        )
        for number in range(config.held_out.scenes)
    ]


async def main(command: Command[TrainingLaunch, DrivingConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    model = await asyncio.to_thread(
        load_policy, config.policy, CheckpointFormat(cameras=("image",)), config.run.device
    )
    print(f"starting from the policy in {config.policy}; {described(model)}", flush=True)
    episodes = held_out_episodes(config)
    return await launch(
        command,
        starts_of(config),
        model,
        EpisodeFootprint(
            what_runs="the driving world",
            simulator_mb=45,
            server_mb=60,
            chunk_bytes=3 * IMAGE_SIZE**2 + 1024,
            num_chunks=1,
        ),
        {"scenes": f"train 0-{config.scenes - 1}", "score": config.version},
        ScoreJudge(episodes, config.held_out) if episodes else None,
        within_range(embodied_agent),
    )
