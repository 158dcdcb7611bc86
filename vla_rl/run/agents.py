"""The agents that run the episodes of a training run."""

import asyncio
import contextlib
import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.envs.text import is_text_task
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig, TextTrainingConfig
from vla_rl.rollout import chat_agent, embodied_agent
from vla_rl.types import Agent, EnvSpec
from vla_rl.util.sole_owner import beside, sole_owner

CONTROL_ID: Final = "vla_rl/control-v0"


def agent_of(config: LearningConfig) -> Agent:
    """Return the default agent: `chat_agent` in text environments, else `embodied_agent`."""
    return (
        partial(chat_agent, limits=config.chat)
        if isinstance(config, TextTrainingConfig)
        else embodied_agent
    )


async def recorded(agent: Agent, record_to: str | None, envs: Iterable[EnvSpec], run: str) -> Agent:
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
    from vla_rl.run.recording import EpisodeRecorder

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
            stack.enter_context(sole_owner(beside(folder), f"the data set {folder}"))
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


def digest_of_run(what: Any) -> str:
    """Return a short name for a run's settings; the same for equal plain values."""
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:12]


def common_metadata(envs: Iterable[EnvSpec], name: str) -> Any:
    """Return `name` from the metadata of the simulators among `envs`; None if they lack it."""
    ids = sorted({_simulator_id(env) for env in envs if not is_text_task(env)})
    said = {_metadata_of(env_id).get(name): env_id for env_id in ids}
    if len(said) > 1:
        raise ConfigError(
            f"{name} differs: {said}, but a data set has only one; record these environments in "
            "separate runs"
        )
    return next(iter(said), None)


def _simulator_id(env: EnvSpec) -> str:
    """Return the id of an environment, and of the wrapped one for `vla_rl/control-v0`."""
    return str(env.kwargs.get("env_id", env.id)) if env.id == CONTROL_ID else env.id


def _metadata_of(env_id: str) -> Mapping[str, Any]:
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
