"""What all LIBERO recipes that train share: which tasks to play, with which base policy, and what to do with that.

A recipe is this with other defaults: `srpo_libero`, `grpo_libero`, `ppo_libero`.
"""

from pathlib import Path
from typing import Literal

import msgspec

from vla_rl.envs.libero.assets import Assets, find_assets
from vla_rl.envs.libero.tasks import find_task, step_limit_of
from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.recipes.checkpoints import BASE_POLICY
from vla_rl.recipes.command_line import Command, TrainingLaunch
from vla_rl.recipes.launching import launch
from vla_rl.recipes.plan import EpisodeFootprint
from vla_rl.recipes.training_config import EmbodiedConfig
from vla_rl.rollout import TaskStart
from vla_rl.simulation import SimulatorConfig
from vla_rl.types import EnvSpec


class LiberoConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning on tasks of one LIBERO suite."""

    suite: Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"] = "libero_object"
    """LIBERO's suite."""

    task_ids: tuple[int, ...] = (1,)
    """Tasks of the suite, in LIBERO's own order."""

    train_init_states: int = 40
    """The first so many of LIBERO's fixed initial states are trained on; the rest stay unseen."""

    step_limit: int | None = None
    """Control steps after which an episode is a failure; none for the suite's published limit."""

    image_size: int = 84
    """Side in pixels of the cameras' pictures; the policy resizes them to its own."""

    physics: Literal["fast", "exact"] = "fast"
    """`fast`: several times as many control steps a second, to train with; `exact`: LIBERO's own, as evaluations have it."""

    quality: Literal["fast", "exact"] = "exact"
    """Of the pictures: `exact`: LIBERO's own, which the shipped policy and published ones were taught with; `fast` costs a
    fraction, but draws a plainer robot: for policies that were taught with it."""

    assets: str | None = None
    """Folder of LIBERO's meshes and textures; none for VLA_RL_LIBERO_ASSETS or hf-libero's own download."""

    policy: str = str(BASE_POLICY)
    """Folder of the OpenVLA-OFT checkpoint to start from; the shipped one half learnt task 1 of libero_object."""

    simulators: SimulatorConfig = msgspec.structs.replace(EmbodiedConfig().simulators, rss_limit_mb=4000)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(len(self.task_ids) > 0, "task_ids", "at least one task")
        for task_id in self.task_ids:
            try:
                task = find_task(self.suite, task_id)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            self.require(
                0 < self.train_init_states <= task.num_init_states,
                "train_init_states",
                f"1 to {task.num_init_states}, the initial states of {self.suite}/{task_id}",
            )
        self.require(self.step_limit is None or self.step_limit >= 1, "step_limit", "at least 1 control step, or none")


def starts_of(config: LiberoConfig) -> list[TaskStart]:
    """Every task from every initial state that is trained on."""
    starts = []
    for task_id in config.task_ids:
        kwargs = {
            "task_id": task_id,
            "image_size": config.image_size,
            "step_limit": config.step_limit,
            "assets": config.assets,
            "physics": config.physics,
            "quality": config.quality,
        }
        env = EnvSpec(id=f"vla_rl/{config.suite}-v0", kwargs=kwargs)
        starts += [
            TaskStart(env=env, task=f"{config.suite}/{task_id}", options={"init_state_id": state})
            for state in range(config.train_init_states)
        ]
    return starts


async def main(command: Command[TrainingLaunch, LiberoConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    about: dict[str, str] = {"suite": config.suite, "physics": config.physics, "quality": config.quality}
    if not (command.launch.dry_run or command.launch.draw):
        assets = _assets_of(config)
        print(f"LIBERO's assets are those in {assets.path} ({assets.source})", flush=True)
        about |= {"assets": assets.source, "assets_path": str(assets.path)}
    model = OpenVlaOft.load(Path(config.policy))
    print(f"starting from the policy in {config.policy}", flush=True)
    return await launch(
        command,
        starts_of(config),
        model,
        EpisodeFootprint(
            what_runs=f"{config.suite}, tasks {', '.join(map(str, config.task_ids))}",
            simulator_mb=1100,
            chunk_bytes=2 * 3 * config.image_size**2 + 2048,
            num_chunks=-(-(config.step_limit or step_limit_of(config.suite)) // model.config.chunk_size),
        ),
        about,
    )


def _assets_of(config: LiberoConfig) -> Assets:
    try:
        return find_assets(config.assets)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
