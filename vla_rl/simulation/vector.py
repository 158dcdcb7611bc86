"""A gymnasium vector environment over simulator processes, for training loops that know nothing of asyncio."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vla_rl.simulation.actions import ActionGate
from vla_rl.simulation.batch import SharedBatch
from vla_rl.simulation.checked import EnvDescription
from vla_rl.simulation.config import SimulatorConfig
from vla_rl.simulation.hosted import PackedStep
from vla_rl.simulation.layout import ObservationLayout
from vla_rl.simulation.loop_thread import LoopThread
from vla_rl.simulation.process import SimulatorProcess
from vla_rl.simulation.row_group import Answer, RowGroup, all_of
from vla_rl.simulation.spaces import build_space
from vla_rl.types import EnvSpec, Info

_T = TypeVar("_T")


def make_vec(
    env: EnvSpec | str,
    num_envs: int,
    *,
    copy: bool = True,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    config: SimulatorConfig | None = None,
) -> "ProcessVectorEnv":
    """`num_envs` copies of one environment, in processes of their own, as one `gymnasium.vector.VectorEnv`.

        envs = make_vec("CartPole-v1", num_envs=4)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        envs.close()

    Args:
        env: a spec, or the id alone; any registered id, or `module:id`.
        num_envs: copies.
        copy: give new arrays at every step; False gives the same ones again, overwritten by the next step.
        autoreset_mode: what happens after an episode's end; see gymnasium's `AutoresetMode`.
        config: timeouts, environment variables, and how many copies share a process, which steps them all for one message;
            its `num_envs` does not matter.

    Raises: EnvError if the environment cannot be built, ActorDied if a process does not come up, ConfigError if this
        process's limits on open files or address space leave no room for them.
    """
    spec = EnvSpec(id=env) if isinstance(env, str) else env
    return ProcessVectorEnv(spec, num_envs, copy, AutoresetMode(autoreset_mode), config or SimulatorConfig())


class ProcessVectorEnv(gymnasium.vector.VectorEnv[Any, Any, np.ndarray]):
    """See `make_vec`. Behaves as gymnasium's own vector environments do: seeds, infos, final observations.

    Calls raise `ActorDied` or `ActorFrozen` where a process dies or does not answer, and `EnvError` where an environment
    breaks its contract. All processes end with `close`, and with this process whatever happens.
    """

    def __init__(
        self, env: EnvSpec, num_envs: int, copy: bool, autoreset_mode: AutoresetMode, config: SimulatorConfig
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, expected >= 1.")
        self.num_envs, self.copy, self.autoreset_mode = num_envs, copy, autoreset_mode
        self._thread = LoopThread(f"vector env {env.id}")
        try:
            self._processes, description = self._thread.call(self._start(env, config))
        except BaseException:
            self._thread.close()
            self.closed = True
            raise
        self.metadata = {**description.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode = description.render_mode
        self.single_observation_space = build_space(description.observation_space)
        self.single_action_space = build_space(description.action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._gate = ActionGate(self.single_action_space, env.id)
        self._batch = SharedBatch(ObservationLayout(self.single_observation_space), num_envs)
        firsts = accumulate(len(process.simulators) for process in self._processes[:-1])
        self._groups = [
            RowGroup(process, first, self._batch) for process, first in zip(self._processes, (0, *firsts), strict=True)
        ]
        self._group_of = [group for group in self._groups for _ in group.process.simulators]
        try:
            self._run(self._share_batch())
        except BaseException:
            self.close()
            raise
        finally:
            self._batch.close()
        self._must_reset = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]` (bool [num_envs]).

        Args:
            seed: environment i gets `seed + i`, or the i-th of a list.
            options: handed to each environment, without the mask.
        """
        seeds = self._seeds(seed)
        chosen, plain_options = self._chosen(options)
        self._choose_batch(is_whole=bool(chosen.all()))
        infos = self._run(self._reset_all([int(index) for index in np.flatnonzero(chosen)], seeds, plain_options))
        self._must_reset[chosen] = False
        return self._observations(), self._gathered(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Run one control step everywhere; environments whose episode has ended begin the next one as the mode says."""
        if self.autoreset_mode is AutoresetMode.DISABLED and self._must_reset.any():
            ended = np.flatnonzero(self._must_reset).tolist()
            raise gymnasium.error.ResetNeeded(f"the episodes of environments {ended} are over; reset them first.")
        rows = self._packed_rows(actions)
        self._choose_batch(is_whole=True)
        answers = self._run(self._step_all(rows))
        rewards, ends, cuts, last_infos, finals = zip(*answers, strict=True)
        terminations, truncations = np.array(ends, np.bool_), np.array(cuts, np.bool_)
        infos: dict[str, Any] = {}
        if any(last_infos) or any(finals):
            for index in range(self.num_envs):
                for info in filter(None, (finals[index], last_infos[index])):
                    infos = self._add_info(infos, info, index)
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self._must_reset = terminations | truncations
        return self._observations(), np.array(rewards, np.float64), terminations, truncations, infos

    def _packed_rows(self, actions: Any) -> list[Any]:
        """What travels to each environment; None to those that begin their next episode, whose action does not matter."""
        gate, resets = self._gate, self.autoreset_mode is AutoresetMode.NEXT_STEP and self._must_reset.any()
        rows = None if resets else gate.packed_rows(actions)
        if rows is not None and len(rows) == self.num_envs:
            return rows
        return [
            None if resets and must_reset else gate.pack(gate.one(action))
            for must_reset, action in zip(self._must_reset, iterate(self.action_space, actions), strict=True)
        ]

    def render(self) -> tuple[Any, ...]:
        """What each environment's render gives."""
        return tuple(self._run(self._render_all()))

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments and end their processes."""
        self._thread.close()

    def _observations(self) -> Any:
        return self._batch.give() if self.copy else self._batch.get()

    def _choose_batch(self, *, is_whole: bool) -> None:
        """Where the next observations are written. Those that are not `is_whole` stand beside rows from before."""
        if not self.copy:
            return
        if is_whole:
            self._batch.turn_page()
        else:
            self._batch.keep_rows()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self.closed:
            coroutine.close()
            raise gymnasium.error.ClosedEnvironmentError("this vector environment is closed; make another one.")
        return self._thread.call(coroutine)

    async def _start(self, env: EnvSpec, config: SimulatorConfig) -> tuple[list[SimulatorProcess], EnvDescription]:
        """All processes with all environments built, and what these are like."""
        sizes = config.envs_of_processes(self.num_envs)
        config.require_room(len(sizes))
        starting, leniency = asyncio.Semaphore(config.concurrent_starts), config.leniency()

        async def start(index: int, num_envs: int) -> tuple[SimulatorProcess, EnvDescription]:
            async with starting:
                process = await SimulatorProcess.start(
                    self._thread.runtime,
                    f"{env.id}-{index}",
                    config,
                    index,
                    (env,),
                    num_envs=num_envs,
                    leniency=leniency,
                )
                descriptions = await all_of(simulator.open(env) for simulator in process.simulators)
                return process, descriptions[0]

        started = await all_of(start(*each) for each in enumerate(sizes))
        return [process for process, _ in started], started[0][1]

    async def _share_batch(self) -> None:
        await all_of(group.share_batch(self.num_envs) for group in self._groups)

    async def _reset_all(
        self, rows: list[int], seeds: list[int | None], options: dict[str, Any] | None
    ) -> dict[int, Info]:
        infos = await all_of(self._group_of[row].reset(row, seeds[row], options) for row in rows)
        return dict(zip(rows, infos, strict=True))

    async def _step_all(self, actions: list[Any]) -> list[Answer]:
        """All actions leave at once, in one message to each process where no row of its is reset."""
        resets_at_end = self.autoreset_mode is AutoresetMode.SAME_STEP
        calls: list[Awaitable[list[PackedStep]] | None] = []
        for group in self._groups:
            is_whole = not resets_at_end and all(action is not None for action in actions[group.rows])
            calls.append(group.begin_steps(actions[group.rows]) if is_whole else None)
        if None not in calls:
            return await self._answers_in_order(calls)
        by_group = await all_of(
            group.end_steps(call)
            if call is not None
            else group.step_singly(actions[group.rows], resets_at_end=resets_at_end)
            for group, call in zip(self._groups, calls, strict=True)
        )
        return [*chain.from_iterable(by_group)]

    async def _answers_in_order(self, calls: list[Any]) -> list[Answer]:
        """What all calls gave, which costs no task each; the first failure is raised when all have ended.

        The last one is awaited first: until it is there, most others are too, and wake nobody.
        """
        by_group: deque[list[Answer]] = deque()
        failure: Exception | None = None
        for group, call in zip(reversed(self._groups), reversed(calls), strict=True):
            try:
                by_group.appendleft(await group.end_steps(call))
            except Exception as error:  # raised below
                failure = error
        if failure is not None:
            raise failure
        return [*chain.from_iterable(by_group)]

    async def _render_all(self) -> list[Any]:
        return [*chain.from_iterable(await all_of(group.render() for group in self._groups))]

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None or isinstance(seed, int | np.integer):
            return [None if seed is None else int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"seed has {len(seed)} entries, expected one for each of {self.num_envs} environments.")
        return list(seed)

    def _chosen(self, options: dict[str, Any] | None) -> tuple[np.ndarray, dict[str, Any] | None]:
        """Which environments to reset, and the options without the mask."""
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, np.bool_), options
        mask = options["reset_mask"]
        if (
            not isinstance(mask, np.ndarray)
            or mask.shape != (self.num_envs,)
            or mask.dtype != np.bool_
            or not mask.any()
        ):
            raise ValueError(f"reset_mask is {mask!r}, expected a bool array [{self.num_envs}] with at least one True.")
        return mask, {key: value for key, value in options.items() if key != "reset_mask"}

    def _gathered(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for index, info in infos.items():
            gathered = self._add_info(gathered, info, index)
        return gathered
