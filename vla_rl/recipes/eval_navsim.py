"""Print NavSim's table: `python -m vla_rl.recipes.eval_navsim navtest_scenes --policy base`.

Grades one trajectory in each recorded scene: one of the policy (greedy, by default), or those in a file that any
planner wrote. The scenes come from a navsim install by what `vla-rl export navsim DIR` writes.

    ... navtest_scenes --policy base --by-mean     by the means of the policy's tokens
    ... navtest_scenes --plans plans.npz           trajectories of another planner
    ... navtest_scenes --version pdms_v1           version 1's score
    ... navhard_scenes --policy base               both stages, if the split has two
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tyro
from rich.progress import track

from vla_rl import engines
from vla_rl.actors import Runtime
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.dry_run import open_each
from vla_rl.cli.launch import run_recipe
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.driving.plan_actions import PlanAction, decode_plan
from vla_rl.envs.driving.scores import Version
from vla_rl.envs.driving.scores.navsim import (
    NavsimTable,
    grade,
    list_recorded,
    make_navsim_table,
    read_recorded,
    read_two_stages,
)
from vla_rl.envs.driving.scores.scene_files import read_plans
from vla_rl.errors import ConfigError
from vla_rl.evaluation import embodied_agent_within_range, run_each
from vla_rl.models.loading import DecodingConfig
from vla_rl.recipes.driving_training import IMAGE_SIZE, load_driver
from vla_rl.types import EnvSpec, EpisodeSpec, PositiveInt, Trajectory, derive_seed
from vla_rl.util.atomic_files import replace_file

if TYPE_CHECKING:
    from vla_rl.envs.driving.scores.geometry import Floats
    from vla_rl.models.robot_policy import RobotPolicy


class EvalNavsimConfig(DecodingConfig, frozen=True, kw_only=True):
    """The scenes, the trajectories and the score."""

    scenes: tyro.conf.Positional[str] = "navtest_scenes"
    """Folder of scenes that export_scenes.py wrote."""

    policy: str | None = None
    """Folder or hub id of the policy that plans, of any family; or give `plans`."""

    plans: str | None = None
    """File of trajectories, .npz with the arrays tokens [N], waypoints [N, 8, 3] and interval_s
    (0.5), instead of a policy."""

    version: Version = "epdms_v2"
    """Version of the score."""

    human_filter: bool = True
    """Forgive what the human failed too, in recorded scenes and version 2, as the benchmark
    does."""

    cameras: tuple[str, ...] = ("image",)
    """Keys of the images that the policy reads."""

    image_size: PositiveInt = IMAGE_SIZE
    """Side in pixels that images are resized to: what the policy was trained with."""

    action: PlanAction = "moves"
    """Meaning of the policy's 8 rows of 3 numbers, as in its training: `moves` or `profiles`."""

    num_envs: PositiveInt = max(os.cpu_count() or 1, 1)
    """Processes that read scenes for the policy."""

    torch_threads: PositiveInt = 1
    """Threads for the policy on a CPU."""

    out: str | None = None
    """File that the table is written to as JSON. None: only printed."""

    def __post_init__(self) -> None:
        has_route = self.action == "along_route"
        self.require(not has_route, "action", "moves or profiles, because NavSim gives no route")

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of a policy, if there is none."""
        return (
            {} if self.policy else dict.fromkeys(DecodingConfig.__struct_fields__, "policy is none")
        )

    def require_source(self) -> None:
        """Check that there is a policy, or plans, and not both. Raises: ConfigError."""
        if (self.policy is None) == (self.plans is None):
            raise ConfigError(
                f"policy is {self.policy!r} and plans is {self.plans!r}, expected one of the two: "
                "give --policy or --plans"
            )


async def main(command: Command[Launch, EvalNavsimConfig]) -> int:
    """Plan in every scene, grade, and print the table; return the exit status."""
    config = command.config
    config.require_source()
    try:
        files = list_recorded(Path(config.scenes))
        if command.launch.dry_run:
            return await _rehearse(config, files)
        if config.plans is not None:
            plans = await asyncio.to_thread(read_plans, Path(config.plans))
        else:
            plans = await _make_plans(config, files)
        table = await asyncio.to_thread(graded_table, config, files, plans)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(table.text)
    if config.out is not None:
        content: dict[str, Any] = {
            "version": table.version,
            "num_scenes": table.num_scenes,
            "score": table.score,
            "stages": table.stages,
        }
        if config.plans is None:
            content["actions"] = config.decoding_in_words
        await asyncio.to_thread(replace_file, Path(config.out), msgspec.json.encode(content))
    return 0


def graded_table(
    config: EvalNavsimConfig, files: list[Path], plans: "dict[str, Floats]"
) -> NavsimTable:
    """Return the table of the plans. Raises: ValueError if a scene has no plan."""
    # a table that leaves scenes out cannot be compared with any other
    missing = [file.stem for file in files if file.stem not in plans]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(files)} scenes have no plan, such as {missing[0]}; plan them "
            "too, because a table leaves no scene out."
        )
    graded = [
        grade(read_recorded(file), plans[file.stem], config.version, config.human_filter)
        for file in track(files, "grading", transient=True)
    ]
    return make_navsim_table(graded, config.version, read_two_stages(Path(config.scenes)))


def _load(config: EvalNavsimConfig) -> "RobotPolicy":
    assert config.policy is not None
    model = load_driver(config.policy, config, config.device, config.action, None)
    config.require_means(model)
    return model


async def _make_plans(config: EvalNavsimConfig, files: list[Path]) -> "dict[str, Floats]":
    """Return the policy's trajectory in each scene."""
    model = await asyncio.to_thread(_load, config)
    print(model.describe())
    plans: dict[str, Floats] = {}

    async def done(trajectory: Trajectory) -> None:
        number = trajectory.episode.options["init_state_id"]
        actions = trajectory.steps[0].chunk.actions
        # the state begins with the speed, from which a plan's first rows are decoded
        speed = float(trajectory.steps[0].observation["state"][0])
        plans[files[number].stem] = decode_plan(actions[:8], config.action, speed, None)

    async with (
        Runtime("eval_navsim") as runtime,
        engines.DeviceLane(config.torch_threads) as lane,
        SimulatorPool(runtime, SimulatorConfig(num_envs=min(config.num_envs, len(files)))) as pool,
        engines.TorchActionEngine(model, lane, EngineConfig(max_batch=pool.num_envs)) as engine,
    ):
        episodes = [_episode(config, number) for number in range(len(files))]
        await run_each(pool, engine, embodied_agent_within_range, episodes, done)
    return plans


async def _rehearse(config: EvalNavsimConfig, files: list[Path]) -> int:
    """Read everything that the command would read."""
    read_two_stages(Path(config.scenes))
    # all of them: one damaged file among thousands would end the evaluation near its end
    await asyncio.to_thread(lambda: [read_recorded(file) for file in files])
    if config.plans is not None:
        read_plans(Path(config.plans))
    else:
        await asyncio.to_thread(_load, config)
        # one environment: all scenes of the folder have the same arguments
        await open_each([_env(config)], SimulatorConfig())
    print(f"{len(files)} scenes; everything that the command would read was found")
    return 0


def _env(config: EvalNavsimConfig) -> EnvSpec:
    kwargs = {
        # resolved, because simulator processes may stand in another folder
        "folder": str(Path(config.scenes).resolve()),
        "version": config.version,
        "action": config.action,
        "image_size": config.image_size,
        "cameras": [
            "cam_f0" if key == "image" else key.removeprefix("image_") for key in config.cameras
        ],
    }
    return EnvSpec(id="vla_rl/navsim-v0", kwargs=kwargs)


def _episode(config: EvalNavsimConfig, number: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=number,
        member=0,
        env=_env(config),
        task="navsim",
        options={"init_state_id": number},
        sampling=config.sampling,
        seed=0,
        policy_seed=derive_seed(config.seed, "navsim", number),
    )


cli = partial(run_recipe, Launch, EvalNavsimConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
