"""The environments of a vector environment, in all its processes: one row each.

They are driven from inside the loop.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from itertools import accumulate, chain
from typing import Any

from vla_rl.actors import Runtime
from vla_rl.actors.completion import all_of
from vla_rl.env_workers.batch import SharedBatch
from vla_rl.env_workers.checked import EnvDescription
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.layout import ObservationLayout
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.env_workers.row_group import Answer, RowGroup
from vla_rl.env_workers.spaces import build_space
from vla_rl.env_workers.worker import PackedStep
from vla_rl.types import EnvSpec, Info


class EnvRows:
    """Resets, steps and queries rows by their numbers; observations are written into `batch`.

    Args:
        processes: processes with one open environment for each row, in order.
        description: description of one environment.
    """

    def __init__(self, processes: list[SimulatorProcess], description: EnvDescription) -> None:
        self.processes, self.description = processes, description
        self._num_rows = sum(len(process.envs) for process in processes)
        self.batch = SharedBatch(
            ObservationLayout(build_space(description.observation_space)), self._num_rows
        )
        firsts = accumulate(len(process.envs) for process in processes[:-1])
        self._groups = [
            RowGroup(process, first, self.batch)
            for process, first in zip(processes, (0, *firsts), strict=True)
        ]
        self._group_of = [group for group in self._groups for _ in group.process.envs]

    @classmethod
    async def start(
        cls, runtime: Runtime, env: EnvSpec, num_envs: int, config: SimulatorConfig
    ) -> "EnvRows":
        """Start all processes with all environments built."""
        sizes = config.envs_of_processes(num_envs)
        config.require_room(len(sizes))
        starting, leniency = asyncio.Semaphore(config.concurrent_starts), config.leniency()

        async def start(index: int, num_in_it: int) -> tuple[SimulatorProcess, EnvDescription]:
            async with starting:
                process = await SimulatorProcess.start(
                    runtime,
                    f"{env.id}-{index}",
                    config,
                    index,
                    (env,),
                    num_envs=num_in_it,
                    leniency=leniency,
                )
                descriptions = await all_of(each.open(env) for each in process.envs)
                return process, descriptions[0]

        started = await all_of(start(*each) for each in enumerate(sizes))
        rows = cls([process for process, _ in started], started[0][1])
        try:
            await all_of(group.share_batch(num_envs) for group in rows._groups)
        finally:
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
        infos = await all_of(
            self._group_of[row].reset(row, seeds[row], options[row]) for row in rows
        )
        return dict(zip(rows, infos, strict=True))

    async def step(self, actions: list[Any], *, resets_at_end: bool) -> list[Answer]:
        """Run one control step in each row.

        A row whose action is None begins its next episode instead.

        All actions are sent at once, in one message to each process if none of its rows is reset.
        With `resets_at_end` a row whose episode ends begins the next one in the same step.
        """
        calls: list[Awaitable[list[PackedStep]] | None] = []
        for group in self._groups:
            is_whole = all(action is not None for action in actions[group.rows])
            calls.append(group.begin_steps(actions[group.rows]) if is_whole else None)
        if None in calls:
            by_group = await all_of(
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
            begun = await all_of(self._group_of[row].begin_next(row, answers[row]) for row in ended)
            for row, answer in zip(ended, begun, strict=True):
                answers[row] = answer
        return answers

    async def render(self, rows: Sequence[int]) -> list[Any]:
        """Return what `render` of these rows returns."""
        return await all_of(self._group_of[row].render(row) for row in rows)

    async def call(
        self, rows: Sequence[int], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Return the results of a method of these rows, or an attribute."""
        return await all_of(self._group_of[row].call(row, name, args, kwargs) for row in rows)

    async def set_attr(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of these rows, one value for each."""
        pairs = zip(rows, values, strict=True)
        await all_of(self._group_of[row].set_attr(row, name, value) for row, value in pairs)

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
