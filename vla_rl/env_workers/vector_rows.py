"""The environments of a vector environment, one row each in a batch that all processes write into.

They are driven from inside the loop: `EnvRows` has all of them, a `RowGroup` those of one process.
"""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Awaitable, Sequence
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from vla_rl.actors import Runtime, begin_call
from vla_rl.env_workers.checked_env import EnvDescription
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.packing import NUM_BATCHES, ObservationLayout, Others
from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess
from vla_rl.env_workers.spaces import build_space, mark, unmark
from vla_rl.env_workers.worker import EnvWorker, PackedStep
from vla_rl.errors import ActorDied, EnvError
from vla_rl.types import EnvSpec, Info
from vla_rl.util.processes import make_memory_file
from vla_rl.util.tasks import gather_all


class SharedBatch:
    """Row i is the newest observation of environment i, in the layout of gymnasium's `batch_space`.

    Arrays of one shape are in memory that the simulators open by `path` and write row by row; all
    other values arrive by `store_others`. Whole numbers are stacked, texts become a tuple. The memory has
    room for several batches; the simulators write into batch number `current`.

    Args:
        layout: layout of one environment's observation.
        num_envs: number of rows.
    """

    def __init__(self, layout: ObservationLayout, num_envs: int) -> None:
        self._layout, self._num_envs = layout, num_envs
        self._num_bytes = max(1, layout.batch_bytes(num_envs))
        # one file for all batches: simulators open it once, and requests name a batch by a number
        self._fd = make_memory_file("vla_rl-batch", NUM_BATCHES * self._num_bytes)
        self._memory = mmap.mmap(self._fd, 0)
        self._batches = [
            np.ndarray(self._num_bytes, np.uint8, self._memory, number * self._num_bytes)
            for number in range(NUM_BATCHES)
        ]
        self._arrays = layout.get_arrays(self._batches[0], num_envs)
        self._others: list[Others] = [[None for _ in layout.others] for _ in range(num_envs)]
        self._free = deque(range(1, NUM_BATCHES))
        self.current = self._last_detached = 0
        """Number of the batch being written, and of the one handed out last; batch 0 is never handed
        out."""

    @property
    def path(self) -> str:
        """Path by which a process of this user opens the memory, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Let no further process open the memory.

        It exists as long as a process or an array uses it.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def store_others(self, index: int, others: Others) -> None:
        """Store the values of one environment that are not arrays."""
        if others:
            self._others[index] = others

    def copy_row(self, index: int) -> Any:
        """Return a copy of one environment's observation."""
        arrays = self._layout.get_arrays(self._batches[self.current], self._num_envs)
        return self._layout.assemble(
            [array[index, ...].copy() for array in arrays], self._others[index]
        )

    def get(self) -> Any:
        """Return batch 0, valid until `start_batch`; later rows are written into its arrays."""
        return self._layout.assemble(self._arrays, self._columns())

    def start_batch(self) -> None:
        """Have later rows written into a batch that `detach` can hand out, if one is free."""
        if self.current == 0 and self._free:
            self.current = self._free.pop()

    def keep_other_rows(self) -> None:
        """Keep the rows of the last batch, except those that are written from now on."""
        if self.current != 0:  # its content was never handed out
            self._free.append(self.current)
            self.current = 0
        if self._last_detached != 0:
            # gymnasium returns all rows, also those that were not reset; they are in the batch that
            # was handed out, and its owner may write into it
            np.copyto(self._batches[0], self._batches[self._last_detached])

    def detach(self) -> Any:
        """Return the batch, owned by its receiver.

        Its memory is written again only when its last array is gone.
        """
        number, self.current = self.current, 0
        self._last_detached = number
        # the receiver keeps more batches than there are: waiting for it would stop its own loop
        if number == 0:
            content = self._batches[0].copy()
        else:
            content = _DetachedBatch(
                self._num_bytes, np.uint8, self._memory, number * self._num_bytes
            )
            content._number, content._free = number, self._free
        return self._layout.assemble(
            self._layout.get_arrays(content, self._num_envs), self._columns()
        )

    def _columns(self) -> list[Any]:
        if not self._layout.others:
            return []
        columns = zip(*self._others, strict=True)
        return [
            np.array(column, part.dtype) if isinstance(part, spaces.Discrete) else column
            for part, column in zip(self._layout.others, columns, strict=True)
        ]


class _DetachedBatch(np.ndarray):
    """The base of the arrays of a batch that was handed out.

    When the last of them is gone, the batch is free again.
    """

    _number: int
    _free: deque[int]

    def __del__(self) -> None:
        free = getattr(self, "_free", None)  # a view of one is not one itself
        if free is not None:
            free.append(self._number)


Answer: TypeAlias = tuple[float, bool, bool, Info, dict[str, Any] | None]
"""Reward, terminated, truncated, info; and `final_obs` with `final_info` if it was reset in the
same step, else None."""


class RowGroup:
    """Steps and resets its rows; observations are written into a shared batch.

    Args:
        process: process with one open environment for each row.
        first: number of its first row.
        batch: batch of all rows of the vector environment.
    """

    def __init__(self, process: SimulatorProcess, first: int, batch: SharedBatch) -> None:
        self.process, self.first, self._batch = process, first, batch
        self.rows = slice(first, first + len(process.envs))

    async def share_batch(self, num_rows: int) -> None:
        """Let the process write into the batch from now on."""
        await gather_all(
            env.await_recorded(
                self.process.worker.write_rows(
                    number, self._batch.path, self.first + number, num_rows
                )
            )
            for number, env in enumerate(self.process.envs)
        )

    async def reset(self, row: int, seed: int | None, options: dict[str, Any] | None) -> Info:
        """Begin an episode in one of the rows; return its info."""
        with self._env(row) as worker:
            (_, others), info = await worker.reset(
                row - self.first, seed, options, self._batch.current
            )
        self._batch.store_others(row, others)
        return info

    async def render(self, row: int) -> Any:
        """Return what `render` of one of the rows returns."""
        with self._env(row) as worker:
            return await worker.render(row - self.first)

    async def call_method(
        self, row: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a method of one of the rows, or an attribute."""
        with self._env(row) as worker:
            return unmark(await worker.call_method(row - self.first, name, list(args), kwargs))

    async def set_attribute(self, row: int, name: str, value: Any) -> None:
        """Set an attribute of one of the rows."""
        with self._env(row) as worker:
            await worker.set_attribute(row - self.first, name, mark(value, name))

    def begin_steps(self, actions: list[Any]) -> Awaitable[list[PackedStep]]:
        """Send one control step for all rows in one message; `end_steps` awaits the answer."""
        return begin_call(self.process.worker, EnvWorker.step_all, actions, self._batch.current)

    async def end_steps(self, call: Awaitable[list[PackedStep]]) -> list[Answer]:
        """Await the steps that `begin_steps` sent; return the answers."""
        try:
            steps = await call
        except (ActorDied, EnvError) as error:
            for env in self.process.envs:
                # Which row failed is not in a death, and a fault may have left any of them half a
                # step ahead: all are built anew.
                env.record_error(error)
            raise
        answers: list[Answer] = []
        for row, ((_, others), reward, terminated, truncated, info) in enumerate(steps, self.first):
            self._batch.store_others(row, others)
            answers.append((reward, terminated, truncated, info, None))
        return answers

    async def step_singly(self, actions: list[Any]) -> list[Answer]:
        """Run one control step in each row, with a message each.

        A row whose action is None begins its next episode.
        """
        return await gather_all(
            self._step(row, action) for row, action in enumerate(actions, self.first)
        )

    async def begin_next(self, row: int, answer: Answer) -> Answer:
        """Begin the next episode in a row whose episode ended.

        Return the answer with the new info and the final values.
        """
        reward, terminated, truncated, info, _ = answer
        final = {"final_obs": self._batch.copy_row(row), "final_info": info}
        return reward, terminated, truncated, await self.reset(row, None, None), final

    def _env(self, row: int) -> RemoteEnv:
        return self.process.envs[row - self.first]

    async def _step(self, row: int, action: Any) -> Answer:
        if action is None:
            return 0.0, False, False, await self.reset(row, None, None), None
        with self._env(row) as worker:
            (_, others), reward, terminated, truncated, info = await worker.step(
                row - self.first, action, self._batch.current
            )
        self._batch.store_others(row, others)
        return reward, terminated, truncated, info, None


class EnvRows:
    """Resets, steps and queries rows by their numbers; observations are written into `batch`.

    Args:
        processes: processes with one open environment for each row, in order.
        description: description of one environment.
    """

    def __init__(self, processes: list[SimulatorProcess], description: EnvDescription) -> None:
        self.processes, self.description = processes, description
        layout = ObservationLayout(build_space(description.observation_space))
        self.batch = SharedBatch(layout, sum(len(process.envs) for process in processes))
        firsts = accumulate(len(process.envs) for process in processes[:-1])
        self._groups = [
            RowGroup(process, first, self.batch)
            for process, first in zip(processes, (0, *firsts), strict=True)
        ]
        self._group_of = [group for group in self._groups for _ in group.process.envs]

    @classmethod
    async def start_processes(
        cls, runtime: Runtime, env: EnvSpec, num_envs: int, config: SimulatorConfig
    ) -> "EnvRows":
        """Start all processes with all environments built."""
        sizes = config.split_envs(num_envs)
        config.require_limits(len(sizes))
        starting, leniency = asyncio.Semaphore(config.concurrent_starts), config.make_leniency()

        async def start(index: int, num_in_it: int) -> tuple[SimulatorProcess, EnvDescription]:
            async with starting:
                process = await SimulatorProcess.start_process(
                    runtime,
                    f"{env.id}-{index}",
                    config,
                    index,
                    (env,),
                    num_envs=num_in_it,
                    leniency=leniency,
                )
                descriptions = await gather_all(each.build_env(env) for each in process.envs)
                return process, descriptions[0]

        started = await gather_all(start(*each) for each in enumerate(sizes))
        rows = cls([process for process, _ in started], started[0][1])
        try:
            await gather_all(group.share_batch(num_envs) for group in rows._groups)
        finally:
            # all have it open by now; an open path lets later processes of this user read it too
            rows.batch.close()
        return rows

    async def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
    ) -> dict[int, Info]:
        """Begin an episode in some rows, with the seed and the options of each.

        Return their infos.
        """
        infos = await gather_all(
            self._group_of[row].reset(row, seeds[row], options[row]) for row in rows
        )
        return dict(zip(rows, infos, strict=True))

    # who waits                for                       woken by
    # the caller's thread      its coroutine's result    the loop's thread (`LoopThread.run`)
    # `step`, whole groups     the answers, in order     each process; its death or its timeout also answers
    # `step`, single rows      all rows of a group       the last of them
    # `start_processes`        a turn to start           a process that is up, or failed to come up

    async def step(self, actions: list[Any], *, resets_at_end: bool) -> list[Answer]:
        """Run one control step in each row.

        A row whose action is None begins its next episode instead.

        All actions are sent at once, in one message to each process if none of its rows is reset.
        With `resets_at_end` a row whose episode ends begins the next one in the same step.
        """
        calls: list[Awaitable[list[PackedStep]] | None] = []
        for group in self._groups:
            # a group with a row to reset sends a message for each row: a reset has its own deadline
            is_whole = all(action is not None for action in actions[group.rows])
            calls.append(group.begin_steps(actions[group.rows]) if is_whole else None)
        if None in calls:
            by_group = await gather_all(
                group.end_steps(call)
                if call is not None
                else group.step_singly(actions[group.rows])
                for group, call in zip(self._groups, calls, strict=True)
            )
            return [*chain.from_iterable(by_group)]
        answers = await self._answers_in_order(calls)
        if resets_at_end:
            ended = [
                row
                for row, (_, terminated, truncated, *_) in enumerate(answers)
                if terminated or truncated
            ]
            reset_rows = await gather_all(
                self._group_of[row].begin_next(row, answers[row]) for row in ended
            )
            for row, answer in zip(ended, reset_rows, strict=True):
                answers[row] = answer
        return answers

    async def render(self, rows: Sequence[int]) -> list[Any]:
        """Return what `render` of these rows returns."""
        return await gather_all(self._group_of[row].render(row) for row in rows)

    async def call_methods(
        self, rows: Sequence[int], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Return the results of a method of these rows, or an attribute."""
        return await gather_all(
            self._group_of[row].call_method(row, name, args, kwargs) for row in rows
        )

    async def set_attribute(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of these rows, one value for each."""
        pairs = zip(rows, values, strict=True)
        await gather_all(
            self._group_of[row].set_attribute(row, name, value) for row, value in pairs
        )

    async def _answers_in_order(self, calls: list[Any]) -> list[Answer]:
        """Await all calls without a task each; return the answers in order.

        A failure is raised when all calls have ended.

        The last call is awaited first: once it is answered, most others are too, and need no
        wake-up.
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
