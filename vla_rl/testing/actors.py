"""Rules that an actor has to keep, as tests to inherit.

An actor is written once and placed later: in this loop, in a child process, on another host. What it keeps
outside of its instance, or what only survives in the process that made it, shows when it is moved or
restarted. These tests move and restart it.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from vla_rl.actors import Actor, ChildProcess, InLoop, Placement, RestartPolicy, Runtime
from vla_rl.errors import ActorDied


class ActorContract:
    """Rules of any actor. Set `actor` and `arguments`, and write `use`."""

    actor: ClassVar[type[Actor]]

    arguments: ClassVar[tuple[Any, ...]] = ()
    """Arguments of its constructor."""

    in_process: ClassVar[Placement] = ChildProcess()
    """Placement of the actor outside of this loop."""

    deadline_s: ClassVar[float] = 60.0
    """Limit for each test. A child process imports the actor's module anew: seconds if that is torch."""

    stop_grace_s: ClassVar[float] = 20.0
    """Longest time that it may take to stop; afterwards its process would be killed."""

    async def use(self, actor: Any) -> Any:
        """Call methods of a new actor; what this returns is compared between places."""
        raise NotImplementedError

    async def spawn(self, runtime: Runtime, placement: Placement, **options: Any) -> Any:
        return await runtime.spawn(
            self.actor, *self.arguments, name="tested", placement=placement, **options
        )

    def test_it_answers_alike_in_this_loop_and_in_a_process_of_its_own(self) -> None:
        async def use_both() -> list[Any]:
            async with (
                asyncio.timeout(self.deadline_s),
                Runtime(stop_grace_s=self.stop_grace_s) as runtime,
            ):
                placements = (InLoop(), self.in_process)
                return [await self.use(await self.spawn(runtime, each)) for each in placements]

        in_loop, in_process = asyncio.run(use_both())
        np.testing.assert_equal(in_process, in_loop)

    def test_two_of_them_share_no_state(self) -> None:
        async def use_both() -> list[Any]:
            async with (
                asyncio.timeout(self.deadline_s),
                Runtime(stop_grace_s=self.stop_grace_s) as runtime,
            ):
                both = [await self.spawn(runtime, InLoop()) for _ in range(2)]
                return [await self.use(actor) for actor in both]

        one, other = asyncio.run(use_both())
        np.testing.assert_equal(other, one)

    def test_a_killed_one_is_replaced_and_answers_as_a_new_one(self) -> None:
        async def use_again() -> tuple[Any, Any]:
            async with (
                asyncio.timeout(self.deadline_s),
                Runtime(stop_grace_s=self.stop_grace_s) as runtime,
            ):
                actor = await self.spawn(runtime, self.in_process, restart=RestartPolicy())
                before = await self.use(actor)
                os.kill(runtime.info(actor).pid, signal.SIGKILL)
                try:
                    return before, await self.use(actor)
                except (
                    ActorDied
                ):  # this call found the death; the next one waits for the new process
                    return before, await self.use(actor)

        before, after = asyncio.run(use_again())
        np.testing.assert_equal(after, before)

    @pytest.mark.parametrize("is_cancelled", [False, True], ids=["answered", "cancelled"])
    def test_it_ends_with_its_runtime_and_leaves_no_process(self, is_cancelled: bool) -> None:
        async def use_and_leave() -> int:
            async with asyncio.timeout(self.deadline_s):
                async with Runtime(stop_grace_s=self.stop_grace_s) as runtime:
                    actor = await self.spawn(runtime, self.in_process)
                    using = asyncio.create_task(self.use(actor))
                    if is_cancelled:
                        await asyncio.sleep(0)
                        using.cancel()
                        await asyncio.wait([using])
                    else:
                        await using
                    pid = runtime.info(actor).pid
                    left_at = time.monotonic()
                assert time.monotonic() - left_at < self.stop_grace_s
                with pytest.raises(ActorDied, match="stopped by its owner"):
                    await self.use(actor)
                return pid

        pid = asyncio.run(use_and_leave())
        assert not Path(f"/proc/{pid}").exists()
