"""The final answer in a long reply, and when two answers are the same text."""

import re
import string
from typing import Final

_ANSWER_TAG: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES: Final = re.compile(r"####[ \t]*([^\n]+)")
_LABEL: Final = re.compile(r"(?im)^[ \t*#]*(?:the )?(?:final )?answer(?: is)?[ \t*]*[:=]([^\n]+)$")
_FENCE: Final = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)


def final_answer(reply: str) -> str:
    """What a reply settles on: the last `<answer>...</answer>`, `\\boxed{...}`, `#### ...` or `Answer: ...`, in that order
    of preference; the whole reply where there is none of them."""
    if tags := _ANSWER_TAG.findall(reply):
        return str(tags[-1]).strip()
    if (boxed := last_boxed(reply)) is not None:
        return boxed.strip()
    for pattern in (_HASHES, _LABEL):
        if found := pattern.findall(reply):
            return str(found[-1]).strip(" \t\r*")
    return reply.strip()


def last_boxed(reply: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces inside it included; None where there is none, or it is not closed."""
    start = reply.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for place in range(begin, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[place], 0)
        if depth == 0:
            return reply[begin:place]
    return None


def last_program(reply: str) -> str:
    """The last fenced block of Python; the whole reply where nothing is fenced."""
    blocks = _FENCE.findall(reply)
    return str(blocks[-1]) if blocks else reply


def plain(text: str) -> str:
    """Lower case, without punctuation, articles and double spaces (Rajpurkar et al. 2016, SQuAD's evaluation)."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree line by line, but for spaces at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
