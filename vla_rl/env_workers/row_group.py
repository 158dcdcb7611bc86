"""The rows of a vector environment that run in one process."""

from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias

from vla_rl.actors import begin
from vla_rl.actors.completion import all_of
from vla_rl.env_workers.attributes import marked, unmarked
from vla_rl.env_workers.batch import SharedBatch
from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess
from vla_rl.env_workers.worker import EnvWorker, PackedStep
from vla_rl.errors import ActorDied, EnvError
from vla_rl.types import Info

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
        await all_of(
            env.answered(
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
        self._batch.put(row, others)
        return info

    async def render(self, row: int) -> Any:
        """Return what `render` of one of the rows returns."""
        with self._env(row) as worker:
            return await worker.render(row - self.first)

    async def call(self, row: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a method of one of the rows, or an attribute."""
        with self._env(row) as worker:
            return unmarked(await worker.call(row - self.first, name, list(args), kwargs))

    async def set_attr(self, row: int, name: str, value: Any) -> None:
        """Set an attribute of one of the rows."""
        with self._env(row) as worker:
            await worker.set_attr(row - self.first, name, marked(value, name))

    def begin_steps(self, actions: list[Any]) -> Awaitable[list[PackedStep]]:
        """Send one control step for all rows in one message; `end_steps` awaits the answer."""
        return begin(self.process.worker, EnvWorker.step_all, actions, self._batch.current)

    async def end_steps(self, call: Awaitable[list[PackedStep]]) -> list[Answer]:
        """Await the steps that `begin_steps` sent; return the answers."""
        try:
            steps = await call
        except (ActorDied, EnvError) as error:
            for env in self.process.envs:
                env.note_error(error)
            raise
        answers: list[Answer] = []
        for row, ((_, others), reward, terminated, truncated, info) in enumerate(steps, self.first):
            self._batch.put(row, others)
            answers.append((reward, terminated, truncated, info, None))
        return answers

    async def step_singly(self, actions: list[Any]) -> list[Answer]:
        """Run one control step in each row, with a message each.

        A row whose action is None begins its next episode.
        """
        return await all_of(
            self._step(row, action) for row, action in enumerate(actions, self.first)
        )

    async def begin_next(self, row: int, answer: Answer) -> Answer:
        """Begin the next episode in a row whose episode ended.

        Return the answer with the new info and the final values.
        """
        reward, terminated, truncated, info, _ = answer
        final = {"final_obs": self._batch.row(row), "final_info": info}
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
        self._batch.put(row, others)
        return reward, terminated, truncated, info, None
