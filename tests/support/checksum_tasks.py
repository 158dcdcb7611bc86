"""Tasks that pay by a checksum of what is said, so that hardly two episodes pay alike, whatever a
random policy says.
"""

from vla_rl.envs.text import Ask, Done, TextTask
from vla_rl.types import Info


class Checksum(TextTask):
    """One reply, one payment."""

    async def setup(self, seed: int, options: Info) -> str:
        return "go"

    async def reply(self, text: str) -> Done:
        return Done(checksum(text), is_success=checksum(text) > 0.5)


class ChecksumPair(TextTask):
    """left, right, left, right: each reply earns its checksum, and the last one half of it for left
    too.
    """

    agents = ("left", "right")

    def __init__(self) -> None:
        self._num_replies = 0

    async def setup(self, seed: int, options: Info) -> Ask:
        return Ask("go", agent="left")

    async def reply(self, text: str) -> Ask | Done:
        self._num_replies += 1
        pay = checksum(text)
        if self._num_replies == 4:
            return Done(pay, is_success=pay > 0.5, rewards={"left": pay / 2})
        return Ask("on", agent="right" if self._num_replies % 2 else "left", reward=pay)


def checksum(text: str) -> float:
    """In [0, 1)."""
    return sum(map(ord, text)) % 97 / 97


def score(reply: str, row: dict[str, object]) -> float:
    """A scorer of one's own: the checksum, of the answer too."""
    return checksum(reply + str(row["answer"]))
