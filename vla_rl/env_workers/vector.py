"""A gymnasium vector environment over simulator processes, for training loops without asyncio."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import gymnasium
import msgspec
import numpy as np
import uvloop
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vla_rl.actors import Runtime
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.make_env import wrapper_spec
from vla_rl.env_workers.packing import ActionGate
from vla_rl.env_workers.spaces import build_space
from vla_rl.env_workers.vector_rows import Answer, EnvRows
from vla_rl.types import EnvSpec, WrapperSpec

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous code. `close` ends the runtime and all its actors.

    Args:
        name: name of the thread and of its runtime.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = asyncio.Event()
        self._ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Runtime]] = (
            concurrent.futures.Future()
        )
        # a daemon, so that a program that forgets `close` still ends; its actors end with this process
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop, self.runtime = self._ready.result()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the thread's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the runtime and the thread; closing again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        except BaseException as error:
            # An error after the start has nobody who waits for it here: the thread's excepthook
            # prints it. One before it is raised where the thread was made.
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _live(self) -> None:
        async with Runtime(name=self._name) as runtime:
            self._ready.set_result((asyncio.get_running_loop(), runtime))
            await self._stop.wait()


def make_vec(
    env: EnvSpec | str,
    num_envs: int,
    *,
    copy: bool = True,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    wrappers: Sequence[Callable[..., Any] | WrapperSpec] = (),
    config: SimulatorConfig | None = None,
    **kwargs: Any,
) -> "ProcessVectorEnv":
    """Make `num_envs` copies of one environment as one `gymnasium.vector.VectorEnv`.

    They run in processes of their own.

        envs = make_vec("CartPole-v1", num_envs=4)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        envs.close()

    Args:
        env: a spec, or only the id; any registered id, or `module:id`.
        num_envs: number of copies.
        copy: return new arrays at each step; False returns the same arrays, overwritten by the next
            step.
        autoreset_mode: what happens after an episode's end; see gymnasium's `AutoresetMode`.
        wrappers: wrappers of each copy, innermost first: classes or functions at the top of a
            module, or a `functools.partial` of one with keyword arguments. They are imported and
            applied in the processes.
        config: timeouts, environment variables, and how many copies share a process, which steps
            them all for one message; its `num_envs` is ignored.
        kwargs: arguments of the environment in addition to those of the spec, such as
            `render_mode="rgb_array"`.

    Raises: EnvError if the environment cannot be built, ActorDied if a process does not come up,
        ConfigError if this process's limits on open files or address space are too low, TypeError
        for a wrapper that another process cannot import.
    """
    spec = EnvSpec(id=env) if isinstance(env, str) else env
    spec = msgspec.structs.replace(
        spec,
        kwargs={**spec.kwargs, **kwargs},
        wrappers=(*spec.wrappers, *(wrapper_spec(wrapper) for wrapper in wrappers)),
    )
    return ProcessVectorEnv(
        spec, num_envs, copy, AutoresetMode(autoreset_mode), config or SimulatorConfig()
    )


class ProcessVectorEnv(gymnasium.vector.VectorEnv[Any, Any, np.ndarray]):
    """Behaves as gymnasium's own vector environments do; see `make_vec`.

    Seeds, infos, final observations and attributes are theirs.

    Calls raise `ActorDied` or `ActorFrozen` if a process dies or does not answer, and `EnvError` if
    an environment breaks its contract. All processes end with `close`, and at the latest with this
    process.
    """

    def __init__(
        self,
        env: EnvSpec,
        num_envs: int,
        copy: bool,
        autoreset_mode: AutoresetMode,
        config: SimulatorConfig,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, expected >= 1.")
        self.num_envs, self.copy, self.autoreset_mode = num_envs, copy, autoreset_mode
        self._thread = LoopThread(f"vector env {env.id}")
        try:
            self._rows = self._thread.run_coroutine(
                EnvRows.start_processes(self._thread.runtime, env, num_envs, config)
            )
        except BaseException:
            self._thread.close()
            self.closed = True
            raise
        self._batch, description = self._rows.batch, self._rows.description
        self.metadata = {**description.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode, self.wrapper_classes = (
            description.render_mode,
            description.wrapper_classes,
        )
        self.single_observation_space = build_space(description.observation_space)
        self.single_action_space = build_space(description.action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._gate = ActionGate(self.single_action_space, env.id)
        self._must_reset = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]` (bool [num_envs]).

        Args:
            seed: environment i gets `seed + i`, or the i-th of a list.
            options: passed to each environment, without the mask.
        """
        seeds = self._seeds(seed)
        chosen, plain_options = self._chosen(options)
        rows = [int(index) for index in np.flatnonzero(chosen)]
        observations, infos = self.reset_rows(rows, seeds, [plain_options] * self.num_envs)
        return observations, self._gathered(infos)

    def reset_rows(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        options: Sequence[dict[str, Any] | None],
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """Reset some environments, each with its own seed and options.

        Return all observations, and the infos by row.
        """
        self._choose_batch(is_whole=len(rows) == self.num_envs)
        infos = self._run(self._rows.reset(rows, seeds, options))
        # Only now: a reset that failed leaves its rows to be reset again.
        self._must_reset[list(rows)] = False
        return self._observations(), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Run one control step in all environments.

        Those whose episode ended begin the next one as the mode says.
        """
        observations, answers = self.step_rows(actions)
        rewards, ends, cuts, last_infos, finals = zip(*answers, strict=True)
        infos: dict[str, Any] = {}
        if any(last_infos) or any(finals):
            for index in range(self.num_envs):
                for info in filter(None, (finals[index], last_infos[index])):
                    infos = self._add_info(infos, info, index)
        return (
            observations,
            np.array(rewards, np.float64),
            np.array(ends, np.bool_),
            np.array(cuts, np.bool_),
            infos,
        )

    def step_rows(self, actions: Any) -> tuple[Any, list[Answer]]:
        """Run the same step; return the observations, and the results of each environment.

        Results are reward, terminated, truncated, info, and the final values if it began its next
        episode in this step.
        """
        if self.autoreset_mode is AutoresetMode.DISABLED and self._must_reset.any():
            ended = np.flatnonzero(self._must_reset).tolist()
            raise gymnasium.error.ResetNeeded(
                f"the episodes of environments {ended} are over; reset them first."
            )
        rows = self._packed_rows(actions)
        self._choose_batch(is_whole=True)
        resets_at_end = self.autoreset_mode is AutoresetMode.SAME_STEP
        answers = self._run(self._rows.step(rows, resets_at_end=resets_at_end))
        if not resets_at_end:
            self._must_reset = np.array(
                [terminated or truncated for _, terminated, truncated, _, _ in answers], np.bool_
            )
        return self._observations(), answers

    def _packed_rows(self, actions: Any) -> list[Any]:
        """Return the packed action of each environment.

        None for those that begin their next episode.
        """
        gate, resets = (
            self._gate,
            self.autoreset_mode is AutoresetMode.NEXT_STEP and self._must_reset.any(),
        )
        # one comparison for the whole batch; single checks, which can name the wrong row, only if it fails
        rows = None if resets else gate.pack_rows(actions)
        if rows is not None and len(rows) == self.num_envs:
            return rows
        return [
            None if resets and must_reset else gate.pack(gate.check_action(action))
            for must_reset, action in zip(
                self._must_reset, iterate(self.action_space, actions), strict=True
            )
        ]

    def render(self) -> tuple[Any, ...]:
        """Return what each environment's render returns."""
        return tuple(self._run(self._rows.render(range(self.num_envs))))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return each environment's result of a method, its own or a wrapper's, or attribute.

        Arguments and results are plain values, arrays or spaces: others cannot be sent between
        processes.
        Raises: AttributeError for an unknown name, TypeError for what cannot be sent, and what a
        method raises.
        """
        return tuple(self.call_rows(range(self.num_envs), name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment, or of a wrapper around it."""
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of each environment: to its value in a list or tuple, or all to the same
        one.
        """
        each = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(
                f"{name} has {len(each)} values, expected one for each of "
                f"{self.num_envs} environments."
            )
        self.set_attr_rows(range(self.num_envs), name, each)

    def call_rows(self, rows: Sequence[int], name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of some environments; see `call`."""
        return self._run(self._rows.call_methods(rows, name, args, kwargs))

    def set_attr_rows(self, rows: Sequence[int], name: str, values: Sequence[Any]) -> None:
        """Set an attribute of some environments, one value for each."""
        self._run(self._rows.set_attribute(rows, name, values))

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments and end their processes."""
        self._thread.close()

    def _observations(self) -> Any:
        return self._batch.detach() if self.copy else self._batch.get()

    def _choose_batch(self, *, is_whole: bool) -> None:
        """Choose where the next observations are written.

        If not `is_whole`, the other rows keep their earlier values.
        """
        if not self.copy:
            return
        if is_whole:
            self._batch.start_batch()
        else:
            self._batch.keep_other_rows()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            # A coroutine that nothing awaits would be reported as a RuntimeWarning when it is
            # collected.
            coroutine.close()
            raise gymnasium.error.ClosedEnvironmentError(
                "this vector environment is closed; make another one."
            )
        return self._thread.run_coroutine(coroutine)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None or isinstance(seed, int | np.integer):
            return [None if seed is None else int(seed) + index for index in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"seed has {len(seed)} entries, expected one for each of "
                f"{self.num_envs} environments."
            )
        return list(seed)

    def _chosen(self, options: dict[str, Any] | None) -> tuple[np.ndarray, dict[str, Any] | None]:
        """Return which environments to reset, and the options without the mask."""
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, np.bool_), options
        mask = options["reset_mask"]
        if (
            not isinstance(mask, np.ndarray)
            or mask.shape != (self.num_envs,)
            or mask.dtype != np.bool_
            or not mask.any()
        ):
            raise ValueError(
                f"reset_mask is {mask!r}, expected a bool array [{self.num_envs}] "
                "with at least one True."
            )
        return mask, {key: value for key, value in options.items() if key != "reset_mask"}

    def _gathered(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for index, info in infos.items():
            gathered = self._add_info(gathered, info, index)
        return gathered
