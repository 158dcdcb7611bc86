"""Which of several conversations are read first, so that the others copy what begins alike.

    a group's prompt        p p p p        read once
                            p p p p        copied, but for the last token, from which the reply goes on
    one system prompt       s s s q        read first
                            s s s r r      s copied in the next pass, r read

Equal prompts cost no pass of their own: with only its last token unread, a reply joins the next pass
of the running ones. A beginning that is shared in part takes one pass more, so it has to save some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

WORTH_A_PASS: Final = 96
"""Tokens that one more pass has to save. With 135 million parameters on a CPU it takes as long as some
20 tokens, with larger networks on a GPU as more."""


@dataclass(frozen=True)
class Copy:
    """The beginning of a conversation, held by another one once that is read.

    Example:
        Copy(source=0, num_tokens=53)
    """

    source: int
    num_tokens: int


@dataclass(frozen=True)
class ReadingPlan:
    """Conversations of one pass, by their numbers, and what others copy from them afterwards.

    A conversation in neither is planned again after the pass.

    Example:
        Three equal prompts of 54 tokens:

        ReadingPlan(reads=[0], copies={1: Copy(0, 53), 2: Copy(0, 53)})
    """

    reads: list[int]
    copies: dict[int, Copy]


def plan_reading(conversations: Sequence[np.ndarray], num_held: Sequence[int]) -> ReadingPlan:
    """Plan the next pass over conversations that are not read to their end; at least one is read.

    Args:
        conversations: tokens of each, int64 [P]; equal only if what they stand for is.
        num_held: number of tokens of each that are in its slot already.
    """
    copies: dict[int, Copy] = {}
    distinct: list[int] = []
    # the longest first, because a shorter one may be its beginning
    for number in sorted(range(len(conversations)), key=lambda each: -len(conversations[each])):
        beginning = conversations[number][:-1]
        source = _longest_shared(conversations, distinct, beginning)
        # the last token is always read again: the next one is chosen from it
        if source.num_tokens == len(beginning) > num_held[number]:
            copies[number] = source
        else:
            distinct.append(number)
    first: list[int] = []
    waiting: dict[int, Copy] = {}
    for number in distinct:
        source = _longest_shared(conversations, first, conversations[number][:-1])
        if source.num_tokens > num_held[number]:
            waiting[number] = source
        else:
            first.append(number)
    saved = sum(copy.num_tokens - num_held[number] for number, copy in waiting.items())
    if saved < WORTH_A_PASS:
        return ReadingPlan(distinct, copies)
    ready = {number: copy for number, copy in copies.items() if copy.source in first}
    return ReadingPlan(first, waiting | ready)


def count_shared(held: np.ndarray, beginning: np.ndarray) -> int:
    """Return how many tokens two conversations, int64 [P] each, share from their start."""
    num = min(len(held), len(beginning))
    differs = held[:num] != beginning[:num]
    return int(differs.argmax()) if differs.any() else num


def _longest_shared(
    conversations: Sequence[np.ndarray], among: Sequence[int], beginning: np.ndarray
) -> Copy:
    """Return the most of a beginning that any of some conversations has; 0 tokens if none does."""
    shared = [Copy(each, count_shared(conversations[each], beginning)) for each in among]
    return max(shared, key=lambda copy: copy.num_tokens, default=Copy(0, 0))
