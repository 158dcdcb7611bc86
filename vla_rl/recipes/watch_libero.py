"""Watch episodes of LIBERO:
`python -m vla_rl.recipes.watch_libero --suite libero_object --policy expert --video out.mp4`.

Runs episodes with a scripted expert, with random actions or with the policy in a checkpoint folder,
prints a table of successes and lengths, and writes a video with the instruction and the outcome
below each frame. Without LIBERO's own assets it uses the placeholder assets that ship with this
package.
"""

import asyncio
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from rich.console import Console
from rich.syntax import Syntax

from vla_rl import engines
from vla_rl.actors import Runtime
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.dry_run import distinct_envs, open_each
from vla_rl.cli.launch import run_recipe
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.experts import Expert
from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    EpisodeRecord,
    check_starts,
    libero_episode,
    make_record,
    result_table,
    run_each,
    within_range,
)
from vla_rl.evaluation.contact_sheets import FRAMES_PER_S, WatchedEpisode, caption_episodes
from vla_rl.evaluation.scenes import (
    ImageSize,
    LiberoAssets,
    LiberoQuality,
    LiberoScene,
    Physics,
    assets_in_use,
    describe_other_images,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import Suite, list_suite_tasks, require_for_libero
from vla_rl.models.loading import CheckpointFormat, DecodingConfig
from vla_rl.models.shipped import NAMES
from vla_rl.reporting.videos import encode_mp4
from vla_rl.rollout import ActionEngine, embodied_agent
from vla_rl.types import (
    ActionChunk,
    EpisodeSpec,
    Observation,
    PositiveInt,
    Sampling,
    Trajectory,
    derive_seed,
)
from vla_rl.util.values import plain_console


class WatchConfig(DecodingConfig, frozen=True, kw_only=True):
    """The tasks, the policy that acts, and the video file."""

    suite: Suite = "libero_object"
    """LIBERO's suite."""

    task_ids: tuple[int, ...] | None = None
    """Numbers of the suite's tasks. None: all of them."""

    policy: str = "expert"
    """Policy that acts: expert (scripted, reads the hidden state), random, the folder of a
    checkpoint, or shipped: the base policy of this package that was trained on the assets in
    use; shipped_flow: its flow policy; shipped_goal: its policy for libero_goal."""

    episodes: PositiveInt = 1
    """Number of episodes of each task."""

    init_states: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (0,)
    """Initial states to start from, in turn."""

    video: Path | None = None
    """Write all episodes, one after the other, into this .mp4 file. None: no video."""

    image_size: ImageSize | None = None
    """None: the side that the checkpoint was trained with; 224 without a checkpoint."""

    assets: LiberoAssets = None

    physics: Physics = "exact"

    quality: LiberoQuality | None = None
    """None: the quality that the checkpoint was trained with; exact without a checkpoint."""

    is_greedy: bool = True
    """Take the checkpoint's most likely action, unless `temperature` is set. Otherwise sample, at temperature 1 if
    none is set."""

    def __post_init__(self) -> None:
        self.require(self.is_greedy or not self.by_mean, "is_greedy", "True with by_mean")
        self.require(
            self.video is None or self.video.suffix == ".mp4", "video", "a file that ends in .mp4"
        )
        is_known = self.policy in ("expert", "random", *NAMES) or Path(self.policy).is_dir()
        self.require(is_known, "policy", "expert, random, shipped or the folder of a checkpoint")
        check_starts(self.suite, self.tasks, self.init_states)

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of a checkpoint, if none acts."""
        if self.has_checkpoint:
            return {}
        of_checkpoints = (
            *CheckpointFormat.__struct_fields__,
            "temperature",
            "by_mean",
            "is_greedy",
        )
        return dict.fromkeys(of_checkpoints, f"policy is {self.policy!r}")

    @property
    def sampling(self) -> Sampling:
        """How actions are chosen."""
        chosen = super().sampling
        return chosen if self.is_greedy else msgspec.structs.replace(chosen, greedy=False)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the policy of a checkpoint acts."""
        return self.policy not in ("expert", "random")

    @property
    def scene(self) -> LiberoScene:
        """Conditions of the environments."""
        return LiberoScene.from_options(self, self.policy if self.has_checkpoint else None)

    @property
    def checkpoint_folder(self) -> str:
        """Folder of the checkpoint that `policy` names."""
        return resolve_checkpoint(self.policy, self.assets)

    @property
    def tasks(self) -> tuple[int, ...]:
        """Numbers of the tasks to run."""
        return (
            self.task_ids
            if self.task_ids is not None
            else tuple(range(len(list_suite_tasks(self.suite, "suite"))))
        )


def run_expert(env: LiberoEnv, init_state_id: int, has_frames: bool) -> WatchedEpisode:
    """Run one episode with the scripted expert.

    It reads the hidden state, so the simulator is in this process.
    """
    observation, info = env.reset(options={"init_state_id": init_state_id})
    expert = Expert(env.scene)
    # an image of each control step takes longer than its physics, so only a video pays for it
    env.render_every_step = has_frames
    frames = [observation["image"]] if has_frames else []
    is_over = False
    while not is_over:
        observation, _, terminated, truncated, info = env.step(expert.act())
        if has_frames:
            frames.append(observation["image"])
        is_over = terminated or truncated
    record = EpisodeRecord(
        task=env.task.key,
        start=init_state_id,
        seed=0,
        weights=0,
        member=0,
        value=float(info["is_success"]),
        parts={"steps": float(info["num_steps"]), "attempts": 1.0},
        instruction=env.task.instruction,
    )
    return WatchedEpisode(record, frames, expert.obstacle)


class RandomActions:
    """An `ActionEngine` that draws one action at a time, uniformly from -1 to 1 in each
    dimension.
    """

    weight_version = 0

    async def act(self, _observation: Observation, sampling: Sampling) -> ActionChunk:
        """Draw actions float32 [1, 7] from the seed of `sampling`."""
        actions = np.random.default_rng(sampling.seed).uniform(-1.0, 1.0, (1, 7)).astype(np.float32)
        return ActionChunk(
            actions=actions,
            tokens=actions[0],
            log_probs=np.full(7, -np.log(2.0), np.float32),
            weight_version=0,
        )


async def _open_engine(config: WatchConfig, stack: AsyncExitStack) -> ActionEngine:
    """Return the engine that acts; what it needs is opened on `stack`."""
    if config.policy == "random":
        return RandomActions()
    lane = await stack.enter_async_context(engines.DeviceLane(1))
    folder, source = config.checkpoint_folder, assets_in_use(config.assets).source
    print(f"the policy in {folder} acts")
    warning = describe_other_images(folder, source, config.scene.image_size, config.scene.quality)
    if warning is not None:
        print(warning)
    model = await asyncio.to_thread(config.load_decoder, folder)
    require_for_libero(model, folder, config.scene.image_size)
    return await stack.enter_async_context(engines.TorchActionEngine(model, lane, EngineConfig()))


async def main(command: Command[Launch, WatchConfig]) -> int:
    """Run every episode, then print the table and write the video."""
    config, console = command.config, plain_console()
    if command.launch.dry_run:
        console.print(
            Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json")
        )
        print(f"{len(config.tasks) * config.episodes} episodes by {config.policy}")
        await _rehearse(config)
        console.print("everything that the command would read was found")
        return 0
    await asyncio.to_thread(assets_in_use, config.scene.assets)
    if config.policy == "expert":
        episodes = await _run_expert_episodes(config, console)
    else:
        episodes = await _run_policy(config, console)
    records = [episode.record for episode in episodes]
    console.print(result_table(records, f"{config.suite}, {config.policy}"))
    num_successes = sum(record.is_success for record in records)
    source = assets_in_use(config.scene.assets).source
    print(
        f"{num_successes} of {len(episodes)} episodes succeeded (assets: {source}, physics: "
        f"{config.physics})"
    )
    if config.video is not None:
        config.video.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(encode_mp4, config.video, caption_episodes(episodes), FRAMES_PER_S)
        print(f"video: {config.video}")
    return 0


async def _run_policy(config: WatchConfig, console: Console) -> list[WatchedEpisode]:
    """Run the episodes as an evaluation does, in a simulator process, one after the other."""
    specs = [
        _episode(config, task_id, number)
        for task_id in config.tasks
        for number in range(config.episodes)
    ]
    # frames of every control step only for a video: rendering one takes longer than its physics
    agent = within_range(partial(embodied_agent, frames_every=None if config.video is None else 1))
    episodes: list[WatchedEpisode] = []

    async def done(trajectory: Trajectory) -> None:
        frames: list[np.ndarray] = []
        if config.video is not None:
            frames = [trajectory.steps[0].observation["image"]]
            frames += [
                frame
                for step in trajectory.steps
                if step.frames is not None
                for frame in step.frames
            ]
        # the frames alone are kept; a trajectory has both cameras of every decision besides
        episodes.append(WatchedEpisode(make_record(trajectory), frames))
        console.print(episodes[-1].describe())

    async with AsyncExitStack() as stack:
        engine = await _open_engine(config, stack)
        runtime = await stack.enter_async_context(Runtime("watch"))
        # each environment once: the pool prepares what it is told
        envs = list({spec.task: spec.env for spec in specs}.values())
        pool = await stack.enter_async_context(
            SimulatorPool(runtime, SimulatorConfig(), specs=envs)
        )
        await run_each(pool, engine, agent, specs, done)
    return episodes


async def _rehearse(config: WatchConfig) -> None:
    """Read everything that the episodes would read. Raises: what they would raise."""
    await asyncio.to_thread(assets_in_use, config.scene.assets)
    if config.has_checkpoint:
        require_for_libero(
            await asyncio.to_thread(config.load_decoder, config.checkpoint_folder),
            config.checkpoint_folder,
            config.scene.image_size,
        )
    specs = [_episode(config, task_id, 0) for task_id in config.tasks]
    await open_each(distinct_envs(spec.env for spec in specs), SimulatorConfig())


def _episode(config: WatchConfig, task_id: int, number: int) -> EpisodeSpec:
    env = config.scene.make_env_spec(config.suite, task_id, scene_seed=0)
    state = config.init_states[number % len(config.init_states)]
    seed = derive_seed(config.seed, number)
    return libero_episode(
        env,
        task_id * config.episodes + number,
        f"{config.suite}/{task_id}",
        state,
        sampling=config.sampling,
        seed=seed,
    )


async def _run_expert_episodes(config: WatchConfig, console: Console) -> list[WatchedEpisode]:
    """Run the episodes in one thread of this process, because an environment renders in the thread
    that made it.

    Ctrl-C stops after the current episode.
    """
    loop, episodes = asyncio.get_running_loop(), list[WatchedEpisode]()
    with ThreadPoolExecutor(1, thread_name_prefix="expert") as thread:
        for task_id in config.tasks:
            env = await loop.run_in_executor(thread, _make_env, config, task_id)
            try:
                for number in range(config.episodes):
                    state = config.init_states[number % len(config.init_states)]
                    has_frames = config.video is not None
                    episodes.append(
                        await loop.run_in_executor(thread, run_expert, env, state, has_frames)
                    )
                    console.print(episodes[-1].describe())
            finally:
                await loop.run_in_executor(thread, env.close)
    return episodes


def _make_env(config: WatchConfig, task_id: int) -> LiberoEnv:
    """Make the environment of a task. Raises: ConfigError naming an asset that is missing."""
    try:
        return LiberoEnv(config.suite, task_id, **config.scene.kwargs)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def cli() -> int:
    """Run the command line; return the exit status."""
    try:
        return run_recipe(Launch, WatchConfig, main, __doc__ or "")
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(cli())
