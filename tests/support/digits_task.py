"""A conversation that pays for digits: from random weights, a policy can learn it in seconds."""

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
