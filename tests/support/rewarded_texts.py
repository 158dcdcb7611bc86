"""Conversations that pay for what a random policy says, for digits or by a checksum: hardly two pay alike."""

from vla_rl.envs.text import Ask, Done, TextTask
from vla_rl.types import Info


class Digits(TextTask):
    """Two turns, each rewarded with half of the share of digits in the reply."""

    def __init__(self) -> None:
        self._num_replies = 0
        self._earned = 0.0

    async def setup(self, seed: int, options: Info) -> str:
        return "go"

    async def reply(self, text: str) -> Ask | Done:
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        self._num_replies += 1
        self._earned += 0.5 * share
        if self._num_replies == 1:
            return Ask("on", reward=0.5 * share)
        return Done(0.5 * share, is_success=self._earned > 0.5)


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
