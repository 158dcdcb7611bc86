"""A verifiers environment as a pool of text environments, with a process of its own.

`chat_agent`, groups and schedulers run them like any other.

    config = VerifiersConfig(env="gsm8k", python="/venvs/verifiers/bin/python")
    async with Runtime() as runtime, VerifiersPool(runtime, config) as pool:
        ...  # `pool.starts()`: one start for each row of its data set
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from vla_rl.actors import Actor, ChildProcess, RestartPolicy, Runtime, actor_method
from vla_rl.endpoint.server import Endpoint
from vla_rl.endpoint.session import new_key
from vla_rl.endpoint.verifiers.episode import Relay, VerifiersEpisode
from vla_rl.endpoint.verifiers.rollouts import (
    RolloutResult,
    VerifiersEnvironment,
    describe_causes,
    find_environment,
)
from vla_rl.errors import ConfigError, DataError, EnvError
from vla_rl.rollout import TaskStart
from vla_rl.types import Config, EnvSpec, EpisodeSpec, PositiveFloat, PositiveInt
from vla_rl.util.stalls import waiting

logger = logging.getLogger(__name__)

KIND_CHARACTERS: Final = 80
SHOWN_CHARACTERS: Final = 400
MAX_WARNINGS: Final = 5
"""Most warnings about errors of one environment: they may hold what a policy wrote."""


class VerifiersWorker(Actor):
    """Loads an environment once, and runs any number of its rows at a time.

    Args:
        env_id: name of the environment in verifiers.
        arguments: arguments of the environment, as plain values.
        max_rows: rows of the data set that are used; None: all.
    """

    def __init__(self, env_id: str, arguments: dict[str, Any], max_rows: int | None) -> None:
        self._env_id, self._arguments, self._max_rows = env_id, arguments, max_rows
        self._environment: VerifiersEnvironment | None = None

    async def on_start(self) -> None:
        """Load the environment.

        Raises: ConfigError, with the cause, if verifiers or the environment cannot be loaded.
        """
        try:
            # At the start and not at the first row, so that a package that is missing is one error
            # and not the loss of every episode.
            environment = find_environment(self._env_id, self._arguments, self._max_rows)
            await environment.open_environment()
        except ConfigError:
            raise
        except Exception as error:  # an environment's own code may raise any error
            raise ConfigError(
                f"verifiers cannot load {self._env_id!r}: {describe_causes(error)}"
            ) from error
        self._environment = environment

    async def on_stop(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            await self._environment.close_environment()

    async def num_examples(self) -> int:
        """Return the number of rows of the data set."""
        assert self._environment is not None
        return (
            self._environment.num_examples
            if self._max_rows is None
            else min(self._environment.num_examples, self._max_rows)
        )

    async def roles(self) -> tuple[str, ...]:
        """Return the names of the agents, which are the models that they request.

        Empty if there is one agent.
        """
        assert self._environment is not None
        return self._environment.roles

    @actor_method(concurrent=True)
    async def run_row(self, row: int, base_url: str, api_key: str) -> RolloutResult:
        """Run one rollout, whose model is at `base_url`.

        Raises: EnvError if the environment itself fails.
        """
        assert self._environment is not None
        try:
            return await self._environment.run_rollout(row, base_url, api_key)
        except Exception as error:  # an environment's own code may raise any error
            raise EnvError(
                f"the verifiers environment {self._env_id!r} failed at row {row}: {describe_causes(error)}"
            ) from error


class VerifiersConfig(Config, frozen=True, kw_only=True):
    """One environment of the verifiers library (0.1.9 to 0.4), in a process of its own."""

    env: str
    """Name of the environment: a module with a `load_environment`, or a v1 taskset."""

    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the environment. A v1 environment takes the fields of its `EnvConfig`, such as
    `{"taskset": {...}, "agent":
    {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}`."""

    max_rows: PositiveInt | None = None
    """Use only this many rows of the data set, the first ones. None: all. Required for a taskset
    without end."""

    python: str | None = None
    """Python interpreter that has verifiers, the environment, and the packages that an actor needs
    (msgspec, numpy, pyzmq, uvloop, aiohttp and vla_rl). None: this interpreter."""

    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the process, such as the keys that its judges need."""

    num_envs: PositiveInt = 64
    """Rollouts that run at the same time."""

    success_at: float = 1.0
    """Smallest reward that counts as success."""

    cut_off_at_errors: bool = False
    """Whether an episode in which the environment raises after a reply ends there, without a reward,
    with one warning a cause. False: such an error ends the run, as a mistake of the environment
    would."""

    start_timeout_s: PositiveFloat = 600.0
    """Most seconds for importing verifiers and loading the environment with its data set."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the process, with the programs of its interpreter in PATH."""
        if self.python is None:
            return self.environment
        # as if its virtual environment were activated: verifiers calls `uv`, which lies there
        folders = (str(Path(self.python).absolute().parent), os.environ.get("PATH", os.defpath))
        return {"PATH": os.pathsep.join(folders), **self.environment}


class VerifiersPool:
    """Implements `vla_rl.types.EnvPool`.

    `EpisodeSpec.options["row"]` chooses the row, otherwise the seed does.

    Raises on entering: ConfigError if verifiers or the environment cannot be loaded.
    """

    def __init__(self, runtime: Runtime, config: VerifiersConfig) -> None:
        self._runtime, self._config = runtime, config
        self._endpoint = Endpoint()
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        # keys are reused: verifiers keeps a client for each that it has seen
        for _ in range(config.num_envs):
            self._keys.put_nowait(new_key())
        self._worker: VerifiersWorker | None = None
        self._num_rows = 0
        self._num_leases = 0
        self._errors: Counter[str] = Counter()
        self._roles: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        config = self._config
        await self._endpoint.__aenter__()
        try:
            self._worker = await self._runtime.spawn(
                VerifiersWorker,
                config.env,
                config.arguments,
                config.max_rows,
                name=f"verifiers {config.env}",
                placement=ChildProcess(python=config.python, env=config.variables),
                restart=RestartPolicy(),
                start_timeout_s=config.start_timeout_s,
                mailbox=2 * config.num_envs,
            )
            self._num_rows = await self._worker.num_examples()
            self._roles = await self._worker.roles()
        except BaseException:
            # The endpoint is open by then, and `async with` does not close what could not be
            # entered.
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._endpoint.__aexit__(kind, error, trace)
        if self._worker is not None:
            await self._runtime.stop(self._worker)

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        return self._config.num_envs

    def starts(self) -> list[TaskStart]:
        """Return one start for each row of the data set; only while the pool is open."""
        spec = EnvSpec(id=self._config.env, kwargs=self._config.arguments)
        task = f"verifiers/{self._config.env}"
        return [
            TaskStart(env=spec, task=task, options={"row": row}) for row in range(self._num_rows)
        ]

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[VerifiersEpisode]:
        """Lease a rollout for this episode; leaving the context ends it.

        Raises: DataError for a row that does not exist.
        """
        worker = self._worker
        if worker is None:
            raise RuntimeError("the pool of verifiers environments is not open; use `async with`.")
        row = episode.options.get("row", episode.seed % max(1, self._num_rows))
        if not isinstance(row, int) or not 0 <= row < self._num_rows:
            raise DataError(
                f"row {row!r} of {self._config.env}, expected a number from 0 to "
                f"{self._num_rows - 1}"
            )
        with waiting(f"episode {episode.episode_id}", on=f"a free rollout of {self._config.env}"):
            key = await self._keys.get()
        self._num_leases += 1
        try:
            relay = Relay()
            policy: Any = {role: relay.for_role(role) for role in self._roles} or relay
            # An endpoint of the pool's own: its requests are answered by the agent that steps the
            # episode, and not by an engine.
            with self._endpoint.session(policy, api_key=key) as session:

                async def run_rollout() -> Any:
                    return await worker.run_row(row, session.base_url, session.api_key)

                env = VerifiersEpisode(
                    episode,
                    relay,
                    run_rollout,
                    self._config.success_at,
                    self._note_error if self._config.cut_off_at_errors else None,
                )
                try:
                    yield env
                finally:
                    await env.cancel_rollout()
        finally:
            self._keys.put_nowait(key)

    def metrics(self) -> dict[str, float]:
        """Return counts since the start; keys read like paths."""
        return {
            "verifiers/leases": float(self._num_leases),
            "verifiers/cut_off_at_errors": float(self._errors.total()),
        }

    def _note_error(self, error: EnvError) -> None:
        """Count an error that cut an episode off, and warn of the first of each kind."""
        # the causes differ in what the policy wrote, so that they are told apart by their beginning
        kind = str(error)[:KIND_CHARACTERS]
        self._errors[kind] += 1
        if self._errors[kind] == 1 and len(self._errors) <= MAX_WARNINGS:
            logger.warning(
                "%s: the episode ends there without a reward, and so do others with this error; "
                "verifiers/cut_off_at_errors counts them",
                str(error)[:SHOWN_CHARACTERS],
            )
