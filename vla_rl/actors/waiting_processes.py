"""Processes of a host whose clients were lost, each until its next client comes or its time is over.

client lost ──► wait ──► claim: the next client of the same owner and name
                  ├────► its time is over, or a process of another owner is launched: killed
                  └────► it ends by itself
"""

import asyncio
import logging
from dataclasses import dataclass

from vla_rl.actors.channel import Death
from vla_rl.actors.child_process import ChildChannel
from vla_rl.actors.codec import Codec
from vla_rl.actors.placement import Takeover
from vla_rl.actors.wire import Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    takeover: Takeover
    process: ChildChannel
    end: asyncio.TimerHandle


class WaitingProcesses:
    """Owns these processes, which no client has at the time."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._dying: set[ChildChannel] = set()
        self._codec = Codec()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, takeover: Takeover, process: ChildChannel) -> None:
        """Let a process wait for its next client; its calls of the last one are cancelled."""
        key = (takeover.owner, takeover.name)
        self._kill(key)
        process.give(0, lambda frames: None, lambda death: self._forget(key, process, death))
        process.send(self._codec.encode(Kind.LOST, 0, 0, 0, None, "lost client"))
        end = asyncio.get_running_loop().call_later(takeover.within_s, self._give_up, key)
        self._waiting[key] = _Waiting(takeover, process, end)

    def claim(self, takeover: Takeover) -> ChildChannel | None:
        """Return the process that waits for this client, if any; kill those of other owners."""
        for key in [key for key in self._waiting if key[0] != takeover.owner]:
            self._kill(key)
        found = self._waiting.pop((takeover.owner, takeover.name), None)
        if found is None:
            return None
        found.end.cancel()
        return found.process

    async def close(self) -> None:
        """Kill all of them, and wait until they have ended."""
        for key in list(self._waiting):
            self._kill(key)
        for process in list(self._dying):
            await process.until_gone()

    def _give_up(self, key: tuple[str, str]) -> None:
        logger.warning(
            "no client took over %s of %s within %g s; it is killed.",
            key[1],
            key[0],
            self._waiting[key].takeover.within_s,
        )
        self._kill(key)

    def _kill(self, key: tuple[str, str]) -> None:
        found = self._waiting.pop(key, None)
        if found is not None:
            found.end.cancel()
            self._dying.add(found.process)
            found.process.kill()

    def _forget(self, key: tuple[str, str], process: ChildChannel, death: Death) -> None:
        """Note the end of a process that waited."""
        self._dying.discard(process)
        found = self._waiting.get(key)
        if found is not None and found.process is process:
            found.end.cancel()
            del self._waiting[key]
            logger.warning("%s, which waited for a client, ended: %s", process.name, death.cause)
