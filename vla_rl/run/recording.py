"""Record the episodes of any run, with every control step, as a LeRobotDataset.

    train(config, starts, model, agent=EpisodeRecorder(LeRobotWriter(folder)).record(my_agent))

`--run.record-to` does the same for the run's own agent.
"""

import asyncio
import contextlib
import hashlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.envs.text import is_text_task
from vla_rl.errors import ConfigError
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.rollout import copy_arrays, embodied_agent
from vla_rl.types import (
    Agent,
    ChunkOutcome,
    Env,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Policy,
    Step,
    Trajectory,
)
from vla_rl.util.ownership import name_lock_file, sole_owner
from vla_rl.util.tasks import run_in_thread

CONTROL_ID: Final = "vla_rl/control-v0"


async def record_agent(
    agent: Agent, record_to: str | None, envs: Iterable[EnvSpec], run: str
) -> Agent:
    """Return the agent with its episodes recorded into a folder; without one, the agent itself.

    Args:
        agent: runs the episodes.
        record_to: folder of the data set; None does not record.
        envs: environments of the episodes; their metadata give the control steps per second and the
            robot.
        run: name that distinguishes these episodes from another run's in the same data set.

    Raises: ConfigError if environments differ in rate or robot; DataError if the folder holds
    something else.
    """
    if record_to is None:
        return agent
    from vla_rl.datasets import LeRobotWriter  # only if episodes are recorded

    def writer() -> LeRobotWriter:
        return LeRobotWriter(Path(record_to), **_dataset_arguments(envs))

    return EpisodeRecorder(await asyncio.to_thread(writer), run).record(agent)


@contextlib.contextmanager
def owned_recording(record_to: str | None) -> Iterator[None]:
    """Keep other processes from recording into the same folder; nothing without one.

    Raises: ConfigError naming the process that records into it, or if it cannot be written.
    """
    if record_to is None:
        yield
        return
    folder = Path(record_to)
    with contextlib.ExitStack() as stack:
        try:
            folder.absolute().parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(sole_owner(name_lock_file(folder), f"the data set {folder}"))
        except OSError as error:
            raise ConfigError(
                f"record_to is {record_to!r}, which cannot be written ({error.strerror}); choose "
                "another folder"
            ) from error
        yield


def check_recording(record_to: str | None, envs: Iterable[EnvSpec]) -> None:
    """Check that episodes of `envs` can be recorded into a folder; writes nothing.

    Raises: as `recorded`.
    """
    if record_to is not None:
        from vla_rl.datasets.lerobot import check_can_add

        check_can_add(Path(record_to), **_dataset_arguments(envs))


def _dataset_arguments(envs: Iterable[EnvSpec]) -> dict[str, Any]:
    """Return the arguments of a data set for episodes of these environments."""
    envs = tuple(envs)
    return {
        "fps": common_metadata(envs, "render_fps"),
        "robot_type": common_metadata(envs, "robot_type"),
    }


def run_digest(what: Any) -> str:
    """Return a short name for a run's settings; the same for equal plain values."""
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:12]


def common_metadata(envs: Iterable[EnvSpec], name: str) -> Any:
    """Return `name` from the metadata of the simulators among `envs`; None if they lack it."""
    ids = sorted({_simulator_id(env) for env in envs if not is_text_task(env)})
    said = {_read_metadata(env_id).get(name): env_id for env_id in ids}
    if len(said) > 1:
        raise ConfigError(
            f"{name} differs: {said}, but a data set has only one; record these environments in "
            "separate runs"
        )
    return next(iter(said), None)


def _simulator_id(env: EnvSpec) -> str:
    """Return the id of an environment, and of the wrapped one for `vla_rl/control-v0`."""
    return str(env.kwargs.get("env_id", env.id)) if env.id == CONTROL_ID else env.id


def _read_metadata(env_id: str) -> Mapping[str, Any]:
    """Return the metadata of a registered environment's class.

    Empty if a function makes the environment.
    """
    from gymnasium import spec
    from gymnasium.envs.registration import load_env_creator

    module, _, name = env_id.rpartition(":")
    try:
        importlib.import_module(module or "vla_rl.envs")
        entry = spec(name).entry_point
        made_by = load_env_creator(entry) if isinstance(entry, str) else entry
    except Exception:  # reported by the simulator's process when it makes the environment
        return {}
    metadata = getattr(made_by, "metadata", {})
    return metadata if isinstance(metadata, Mapping) else {}


logger = logging.getLogger(__name__)


class EpisodeRecorder:
    """Records every control step of an agent's episodes.

    Observations are taken at each step instead of each chunk.

    The trajectory is the same; episodes take longer, because simulators render more images. An
    episode that the data set holds already is not written again; a warning counts those. A thread
    writes one episode at a time, and an episode ends when it is written. An episode that finds no
    room on a full disk is left out with a warning, and the next one is tried. Conversations with a
    text environment are not recorded.

    Args:
        writer: the data set.
        run: name that distinguishes these episodes from another run's in the same data set, such as
            a digest of settings.
    """

    def __init__(self, writer: LeRobotWriter, run: str = "") -> None:
        self._writer, self._run = writer, run
        self.num_left_out = 0
        """Number of episodes that the data set held already."""
        self._failures = FailureReporter(
            "recording episodes", "that episode is not in the data set, the next is tried"
        )
        self._turn = asyncio.Lock()

    @property
    def num_failed(self) -> int:
        """Number of episodes that could not be written."""
        return self._failures.num_failed

    def record(self, agent: Agent = embodied_agent) -> Agent:
        """Return the agent with its episodes recorded."""

        async def run_recorded(env: Env, policy: Policy) -> Trajectory:
            if is_text_task(env.episode.env):
                return await agent(env, policy)
            watched = _RecordingEnv(env)
            trajectory: Any = await agent(watched, policy)
            # The scheduler rejects anything but a trajectory. A planner may end an episode before a control
            # step, of which there is nothing to record.
            if isinstance(trajectory, Trajectory) and watched.actions:
                async with self._turn:
                    await run_in_thread(self._write, trajectory, watched.seen[:-1], watched.actions)
            return trajectory  # type: ignore[no-any-return]

        return run_recorded

    def _write(
        self, trajectory: Trajectory, seen: Sequence[Observation], actions: Sequence[np.ndarray]
    ) -> None:
        episode = recorded_episode(trajectory, seen, actions, self._run)
        if episode.name in self._writer.names:
            self.num_left_out += 1
            logger.warning(
                "the data set holds %r already; %d episodes of this run were not written",
                episode.name,
                self.num_left_out,
            )
            return
        try:
            self._writer.add_episode(episode)
        except OSError as error:
            self._failures.failed(repr(episode.name), error)
        else:
            self._failures.worked()


class _RecordingEnv:
    """An environment that runs chunks one action at a time and stores observations and actions."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.seen: list[Observation] = []
        self.actions: list[np.ndarray] = []

    @property
    def episode(self) -> EpisodeSpec:
        return self._env.episode

    async def reset(self) -> tuple[Observation, Info]:
        observation, info = await self._env.reset()
        self.seen, self.actions = [copy_arrays(observation)], []
        return observation, info

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        outcome = await self.step_chunk(action[None])
        return (
            outcome.observation,
            float(outcome.rewards[0]),
            outcome.terminated,
            outcome.truncated,
            outcome.info,
        )

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        rewards, frames = [], []
        for number in range(len(actions)):
            outcome = await self._env.step_chunk(
                actions[number : number + 1], frames_every=frames_every
            )
            self.seen.append(copy_arrays(outcome.observation))
            self.actions.append(actions[number])
            rewards.append(copy_arrays(outcome.rewards))
            frames += [] if outcome.frames is None else [copy_arrays(outcome.frames)]
            if outcome.terminated or outcome.truncated:
                break
        return msgspec.structs.replace(
            outcome,
            rewards=np.concatenate(rewards),
            frames=np.concatenate(frames) if frames else None,
        )


def recorded_episode(
    trajectory: Trajectory,
    seen: Sequence[Observation],
    actions: Sequence[np.ndarray],
    run: str = "",
) -> RecordedEpisode:
    """Return an episode with the observation before each control step.

    Args:
        trajectory: the episode's trajectory.
        seen: observations, one for each control step; their images and vectors are stored.
        actions: actions [D], one for each control step.
        run: name of the run, for the episode's name.
    """
    first = seen[0]
    is_image = {
        key: isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] == 3
        for key, value in first.items()
    }
    vectors = [
        key
        for key, value in first.items()
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 1
    ]
    episode, words = trajectory.episode, first.get("instruction")
    return RecordedEpisode(
        name=f"{episode_name(episode)} weights "
        f"{trajectory.oldest_version}" + (f" run {run}" if run else ""),
        # an environment may call a vector so, which is then recorded as one
        instruction=words if isinstance(words, str) else episode.task,
        actions=np.stack(actions).astype(np.float32),
        vectors={key: np.stack([step[key] for step in seen]).astype(np.float32) for key in vectors},
        frames={key: partial(_image_at, seen, key) for key, yes in is_image.items() if yes},
        rewards=np.concatenate([step.rewards for step in _list_chunks(trajectory)]),
        instructions=_join_instructions(trajectory),
        intervened=_join_interventions(trajectory),
        is_success=trajectory.is_success,
        about={
            "task": episode.task,
            "options": msgspec.json.encode(episode.options, enc_hook=_plain_option).decode(),
            "policy_seed": episode.policy_seed,
            "weight_version": trajectory.oldest_version,
            **({"run": run} if run else {}),
        },
    )


def _join_interventions(trajectory: Trajectory) -> np.ndarray | None:
    """Return bool [T], the control steps that an expert chose; None if no expert could have."""
    if all(step.intervened is None for step in _list_chunks(trajectory)):
        return None
    chosen: np.ndarray = np.concatenate(
        [
            np.zeros(step.num_executed, bool) if step.intervened is None else step.intervened
            for step in _list_chunks(trajectory)
        ]
    )
    return chosen


def _list_chunks(trajectory: Trajectory) -> list[Step]:
    """Return the decisions that ran control steps: all but a planner's replies."""
    return [step for step in trajectory.steps if not step.is_reply]


def _join_instructions(trajectory: Trajectory) -> tuple[str, ...] | None:
    """Return what a planner told the robot at each control step; None if no planner did."""
    chunks = _list_chunks(trajectory)
    if len(chunks) == len(trajectory.steps):
        return None
    return tuple(
        step.observation["instruction"] for step in chunks for _ in range(step.num_executed)
    )


def _plain_option(value: Any) -> Any:
    """Return an option that JSON cannot hold as lists, or in words."""
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


def _image_at(seen: Sequence[Observation], key: str, step: int) -> np.ndarray:
    return np.asarray(seen[step][key])


def episode_name(episode: EpisodeSpec) -> str:
    """Return the episode's name.

    It is the same in another run of the same seed, such as after a resume.
    """
    options = " ".join(f"{key} {value}" for key, value in sorted(episode.options.items()))
    scene = (
        f" scene {episode.env.kwargs['scene_seed']}" if "scene_seed" in episode.env.kwargs else ""
    )
    return f"{episode.task} {options}{scene} seed {episode.policy_seed}"
