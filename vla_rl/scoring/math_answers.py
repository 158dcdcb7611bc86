"""Comparison of two answers as mathematics, by math-verify.

Runs in a sandbox, because sympy may never return.

Importing this module compares two expressions, so that sympy and its parser are loaded before calls
are forked; this makes the calls a hundred times faster.
"""

import logging

from math_verify import parse, verify

from vla_rl.scoring.scorers import final_answer

# it warns that it has no timeout, but the sandbox has one
logging.getLogger("math_verify").setLevel(logging.ERROR)


def is_same_math(reply: str, answer: str) -> bool:
    """Return whether the final answer of `reply` equals `answer`.

    Both may be numbers, fractions, expressions, sets, intervals or matrices.

    The content of `\\boxed{...}` takes precedence; if the reply marks no final answer, the last one
    that math-verify finds counts.

    Raises: ValueError if math-verify finds no mathematics in `answer`.
    """
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"the data set's answer {answer!r} is no mathematics; score it with 'exact' or 'match'"
        )
    settled = final_answer(reply)
    given = parse(
        reply if settled == reply.strip() else f"\\boxed{{{settled}}}", parsing_timeout=None
    )
    return bool(verify(gold, given, timeout_seconds=None))


is_same_math("\\boxed{x^2+2x+1}", "(x+1)^2")
