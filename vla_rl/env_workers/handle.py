"""An environment in another process, with asynchronous versions of gymnasium's methods.

Leased, it is bound to one episode.

A chunk of actions takes five calls from an agent to the simulator, one of them over the wire:
EnvHandle, EnvWorker, CheckedEnv, run_chunk, the environment's own step.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.actors import Runtime
from vla_rl.env_workers.checked_env import EnvDescription
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.packing import ActionGate, ObservationLayout, Packed
from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess
from vla_rl.env_workers.spaces import build_space
from vla_rl.errors import ActorDied, EnvError
from vla_rl.types import ChunkOutcome, EnvSpec, EpisodeSpec, Info


class EnvHandle:
    """One environment in another process.

        observation, info = await env.reset(seed=7)
        observation, reward, terminated, truncated, info = await env.step(action)

    Arrays in observations are in memory shared with the simulator and read-only; each stays
    unchanged as long as it is referenced. Raises `ActorDied` if the process dies (`ActorFrozen` if
    it does not answer in time), `EnvError` if the environment breaks its contract, `ValueError` for
    an action outside its space.
    """

    def __init__(self, remote: RemoteEnv, spec: EnvSpec, description: EnvDescription) -> None:
        self.spec = spec
        self.observation_space: spaces.Space[Any] = build_space(description.observation_space)
        self.action_space: spaces.Space[Any] = build_space(description.action_space)
        self.metadata = description.metadata
        self.render_mode, self.render_key = description.render_mode, description.render_key
        self.process = remote.process
        self._remote, self._index = remote, remote.index
        self._layout = ObservationLayout(self.observation_space)
        self._gate = ActionGate(self.action_space, spec.id)
        self._refusal: str | None = None
        """Why calls are refused; None while they are not."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Info]:
        """Begin an episode; return the observation and the info."""
        self._require_open()
        with self._remote as worker:
            packed, info = await worker.reset(self._index, seed, options, 0)
        return self._read(packed), info

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Run one control step; return observation, reward, terminated, truncated, info."""
        if self._refusal is not None:
            self._require_open()
        packed_action = self._gate.pack(self._gate.check_action(action))
        # not `with self._remote`: a step takes 100 us there and back, and two calls more are 1 %
        try:
            packed, reward, terminated, truncated, info = await self._remote.worker.step(
                self._index, packed_action, 0
            )
        except (ActorDied, EnvError) as error:
            self._remote.record_error(error)
            raise
        return self._read(packed), reward, terminated, truncated, info

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Run the rows of [H, D] open loop, with one message each way.

        Stops when they are done or the episode ends.

        `frames_every` = k: `ChunkOutcome.frames` contains what the environment renders after each
        k-th control step of the episode; the environment must have been made with
        `render_mode="rgb_array"`.
        """
        self._require_open()
        actions = self._gate.check_chunk(actions)
        with self._remote as worker:
            packed, rewards, terminated, truncated, info, frames = await worker.step_chunk(
                self._index, actions, frames_every
            )
        return ChunkOutcome(
            observation=self._read(packed),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            info=info,
            frames=frames,
            frames_key=self.render_key,
        )

    async def render(self) -> Any:
        """Return the environment's rendering: an image if `render_mode` is "rgb_array"."""
        self._require_open()
        with self._remote as worker:
            return await worker.render(self._index)

    async def get_state(self) -> Any:
        """Return the simulator's state as plain values, which can be stored, sent and restored."""
        self._require_open()
        with self._remote as worker:
            return await worker.get_state(self._index)

    async def set_state(self, state: Any) -> Any:
        """Continue from a state of this environment or of the same one elsewhere.

        Return the observation there.
        """
        self._require_open()
        with self._remote as worker:
            return self._read(await worker.set_state(self._index, state))

    async def close(self) -> None:
        """Close the environment, and end its process unless others share it.

        Closing again does nothing.
        """
        # Left alone after a lease: the environment may be running another episode by now, which a
        # late close would end.
        if self._refusal is None:
            self._refusal = f"{self.spec.id} was closed here; open or lease another one."
            await self._remote.close()

    def _read(self, packed: Packed) -> Any:
        block, others = packed
        assert block is not None, "an environment used by a handle does not write into a batch"
        return self._layout.unpack_observation(block, others)

    def _require_open(self) -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)


class LeasedEnv(EnvHandle):
    """An environment handle bound to one episode. Implements `vla_rl.types.Env`.

    After the lease its methods raise `RuntimeError`, because the environment may be running another
    episode by then. A step after the end of the episode raises `ResetNeeded`: most environments would go
    on, and an agent that overlooks the end would never return.
    """

    def __init__(
        self, remote: RemoteEnv, episode: EpisodeSpec, description: EnvDescription
    ) -> None:
        super().__init__(remote, episode.env, description)
        self.episode = episode
        self._end: str | None = None
        """How the episode ended; None while it goes on."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Info]:
        """Bring the environment to the start of its episode, or to that of the arguments."""
        # gymnasium's wrappers and agents call reset() without arguments; the episode's own start
        # has to be what they get, or members of one group would start differently.
        if seed is None and options is None:
            seed, options = self.episode.seed, self.episode.options
        self._end = None
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Run one control step, as `EnvHandle.step`. Raises: ResetNeeded after the end of the episode."""
        self._require_unfinished()
        answer = await super().step(action)
        self._note_end(answer[2], answer[3])
        return answer

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Run a chunk, as `EnvHandle.step_chunk`. Raises: ResetNeeded after the end of the episode."""
        self._require_unfinished()
        outcome = await super().step_chunk(actions, frames_every=frames_every)
        self._note_end(outcome.terminated, outcome.truncated)
        return outcome

    async def set_state(self, state: Any) -> Any:
        """Continue from a state, as `EnvHandle.set_state`."""
        self._end = None
        return await super().set_state(state)

    def _require_unfinished(self) -> None:
        if self._end is not None:
            raise gymnasium.error.ResetNeeded(
                f"episode {self.episode.episode_id} is over ({self._end}); an agent ends when `terminated` or "
                "`truncated` is True, and returns its Trajectory; reset() starts the episode again."
            )

    def _note_end(self, terminated: bool, truncated: bool) -> None:
        if terminated or truncated:
            self._end = "terminated" if terminated else "truncated"

    def end_lease(self) -> None:
        """End the lease."""
        self._refusal = (
            f"the lease for episode {self.episode.episode_id} is over; its environment may "
            "serve another episode."
        )


@asynccontextmanager
async def open_env(
    runtime: Runtime,
    env: EnvSpec | str,
    config: SimulatorConfig | None = None,
    *,
    name: str | None = None,
) -> AsyncIterator[EnvHandle]:
    """Open one environment in a process of its own; the process ends with the context.

        async with Runtime(name="main") as runtime, open_env(runtime, "vla_rl/toy_reach-v0") as env:
            observation, info = await env.reset(seed=0)

    Args:
        runtime: owns the process.
        env: a spec, or only the id.
        config: timeouts and environment variables; the numbers of simulators and processes are
            ignored.
        name: name of the process in errors and logs.

    Raises: EnvError if the environment cannot be built, ActorDied if the process does not come up.
    """
    spec = EnvSpec(id=env) if isinstance(env, str) else env
    # The spec is given to the fork server, so that the second handle of a program finds the scenes
    # prepared.
    process = await SimulatorProcess.start_process(
        runtime, name or f"env {spec.id}", config or SimulatorConfig(), specs=(spec,)
    )
    try:
        remote = process.envs[0]
        yield EnvHandle(remote, spec, await remote.build_env(spec))
    finally:
        await process.stop()
