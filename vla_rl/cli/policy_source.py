"""The policy of an evaluation: a checkpoint that is loaded here, or a server that somebody else runs."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.config import EvalConfig
from vla_rl.evaluation.run_episodes import within_range
from vla_rl.evaluation.scenes import describe_other_images
from vla_rl.evaluation.suites import require_fitting
from vla_rl.models.loading import compute_digest, count_weight_bytes
from vla_rl.rollout import RealTimeConfig, embodied_agent, make_real_time_agent
from vla_rl.rollout.engines import ActionEngine
from vla_rl.serving.latencies import latency_table
from vla_rl.serving.remote_config import is_server_address
from vla_rl.types import Agent

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


class PolicySource(Protocol):
    """Gives an evaluation its actions: an engine, and the agent that runs episodes with it."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights that this process holds."""
        ...

    async def read_digest(self) -> str:
        """Return a fingerprint of the policy: results of others are not added to its own."""
        ...

    async def load(self) -> str:
        """Get ready; return one line about the policy. Raises: ConfigError; CheckpointError."""
        ...

    def describe_other_images(self, assets: str) -> str | None:
        """Return one line if the policy will see other images than it was trained on."""
        ...

    def acting(self, max_batch: int) -> Any:
        """Return a context manager that yields an engine, and the agent that runs its episodes."""
        ...

    def latencies(self) -> Table | None:
        """Return a table of the answers' latencies; None for a policy in this process."""
        ...


def open_source(config: EvalConfig) -> PolicySource:
    """Return the source that a configuration names."""
    if is_server_address(config.checkpoint_folder):
        return ServerSource(config)
    return CheckpointSource(config)


def require_real_time(model: Any, folder: str, config: RealTimeConfig) -> None:
    """Raise ConfigError if a policy cannot act under such a delay; AgentError if its chunks are
    too short.
    """
    if not config.delay:
        return
    if config.continues_plan and not getattr(model, "follows_plans", False):
        raise ConfigError(
            f"{folder} is a {type(model).__name__}, which cannot continue the chunk before: only flow "
            "policies can; set --real-time.no-continues-plan to switch to chunks drawn anew, or leave out "
            "--real-time.delay"
        )
    config.count_executed(model.config.chunk_size)


class CheckpointSource:
    """A checkpoint that is loaded into this process, once."""

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self._model: RobotPolicy | None = None

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files. Raises: CheckpointError."""
        return count_weight_bytes(self._config.list_files(self._config.checkpoint_folder))

    async def read_digest(self) -> str:
        """Return a fingerprint of the checkpoint's files. Raises: CheckpointError."""
        files = self._config.list_files(self._config.checkpoint_folder)
        return await asyncio.to_thread(compute_digest, files)

    async def load(self) -> str:
        """Load the policy, unless it is loaded; return how it acts.

        Raises: CheckpointError; ConfigError if it does not fit the benchmark.
        """
        if self._model is None:
            self._model = await asyncio.to_thread(self._load)
        return self._model.describe()

    def _load(self) -> "RobotPolicy":
        config = self._config
        model = config.load_decoder(config.checkpoint_folder)
        size = config.scene.image_size
        require_fitting(model, config.checkpoint_folder, config.benchmark, size)
        require_real_time(model, config.checkpoint_folder, config.real_time)
        return model

    def describe_other_images(self, assets: str) -> str | None:
        """Return one line if the checkpoint was trained on others. Raises: CheckpointError."""
        config = self._config
        return describe_other_images(
            config.checkpoint_folder, assets, config.scene.image_size, config.scene.quality
        )

    @asynccontextmanager
    async def acting(self, max_batch: int) -> AsyncIterator[tuple[ActionEngine, Agent]]:
        """Yield a torch engine; actions are clipped to the benchmark's range."""
        # torch takes 2 s to import, which a dry run of a server's policy does without
        from vla_rl import engines

        assert self._model is not None
        config = engines.EngineConfig(max_batch=max_batch)
        async with (
            engines.DeviceLane(self._config.torch_threads) as lane,
            engines.TorchActionEngine(self._model, lane, config) as engine,
        ):
            delayed = self._config.real_time
            yield (
                engine,
                within_range(make_real_time_agent(delayed) if delayed.delay else embodied_agent),
            )

    def latencies(self) -> Table | None:
        """Return None: nothing travels."""
        return None


class ServerSource:
    """A policy server; it chooses its actions as it was told when it was started."""

    weight_bytes = 0

    def __init__(self, config: EvalConfig) -> None:
        # only now: who evaluates checkpoints alone needs no websockets
        from vla_rl.serving.remote_policy import RemotePolicyServer

        self._config = config
        self._server = RemotePolicyServer(
            config.checkpoint_folder, config.server, config.benchmark.action_size
        )

    async def read_digest(self) -> str:
        """Return a fingerprint of what the server says about itself. Raises: ConfigError."""
        said = msgspec.json.encode(await self._server.read_metadata(), enc_hook=str, order="sorted")
        return hashlib.blake2b(said, digest_size=16).hexdigest()

    async def load(self) -> str:
        """Return what the server says about itself. Raises: ConfigError."""
        said = await self._server.read_metadata()
        shown = ", ".join(f"{name}: {value}" for name, value in said.items())
        return f"policy server {self._server.address} says {shown or 'nothing about itself'}"

    def describe_other_images(self, assets: str) -> str | None:
        """Return None: a server does not say what its policy was trained on."""
        return None

    @asynccontextmanager
    async def acting(self, max_batch: int) -> AsyncIterator[tuple[ActionEngine, Agent]]:
        """Yield the server, and an agent that opens a connection for each episode."""
        yield self._server, self._server.run_agent

    def latencies(self) -> Table:
        """Return the times of the server's answers, the network's included."""
        return latency_table([self._server.latencies], "Answers of the policy server")
