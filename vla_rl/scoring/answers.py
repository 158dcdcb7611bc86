"""Extraction of the final answer from a long reply, and comparison of answers as texts."""

import re
import string
from typing import Final

from vla_rl.util.foreign_text import delimited_spans

_HASHES: Final = re.compile(r"####[ \t]*([^\n]+)")
_LABEL: Final = re.compile(r"(?im)^[ \t*#]*(?:the )?(?:final )?answer(?: is)?[ \t*]*[:=]([^\n]+)$")
_FENCE: Final = re.compile(r"([ \t]*)(`{3,})([^`]*)")
_CLOSING: Final = re.compile(r"([^`]*)(`{3,})[ \t]*+[.,;:]?[ \t]*+")
_PYTHON_TAGS: Final = frozenset({"python", "python3", "py"})


def final_answer(reply: str) -> str:
    """Return the final answer of a reply.

    It is the last `<answer>...</answer>`, `\boxed{...}`, `#### ...` or `Answer: ...`, in that order
    of preference; the whole reply if it has none of them.
    """
    if tags := list(delimited_spans(reply, "<answer>", "</answer>")):
        start, end = tags[-1]
        return reply[start:end].strip()
    if (boxed := last_boxed(reply)) is not None:
        return boxed.strip()
    for pattern in (_HASHES, _LABEL):
        if found := pattern.findall(reply):
            return str(found[-1]).strip(" \t\r*")
    return reply.strip()


def last_boxed(reply: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, with braces inside it.

    None if there is none, or it is not closed.
    """
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
    """Return the program of a reply.

    It is the last fenced block that is tagged as Python, else the last without a tag, else the
    whole reply.
    """
    blocks = fenced_blocks(reply)
    python = [text for tag, text in blocks if tag in _PYTHON_TAGS]
    untagged = [text for tag, text in blocks if not tag]
    return (python or untagged or [reply])[-1]


def fenced_blocks(reply: str) -> list[tuple[str, str]]:
    """Return tag and text of every closed fenced block, in order.

    Tags are in lower case, "" if a block has none.

    A block ends at the first line that consists of at least as many backticks and at most a
    punctuation mark, or that ends in them. The indentation of its opening is removed from its
    lines.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in reply.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence, []
        elif (closing := _CLOSING.fullmatch(line)) is not None and len(closing[2]) >= len(
            opening[2]
        ):
            tag = opening[3].split()
            if closing[1].strip():
                lines.append(closing[1].removeprefix(opening[1]))
            blocks.append((tag[0].lower() if tag else "", "".join(f"{text}\n" for text in lines)))
            opening = None
        else:
            lines.append(line.removeprefix(opening[1]))
    return blocks


def plain(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and double spaces.

    This is SQuAD's normal form (Rajpurkar et al. 2016).
    """
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs agree line by line.

    Spaces at the ends of lines and empty lines at the end are ignored.
    """
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
