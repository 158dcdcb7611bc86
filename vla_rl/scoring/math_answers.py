"""Whether two answers are the same mathematics, by math-verify. Runs in a sandbox: sympy can think for ever.

Importing this module compares two expressions: what sympy and its parser load then is there for all calls that are forked
afterwards, which are a hundred times faster for it.
"""

import logging

from math_verify import parse, verify

from vla_rl.scoring.answers import final_answer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it keeps no time, which the sandbox does


def is_same_math(reply: str, answer: str) -> bool:
    """Whether the final answer of `reply` equals `answer`: numbers, fractions, expressions, sets, intervals, matrices.

    What stands in `\\boxed{...}` counts before anything else; where the reply has no mark of a final answer, what
    math-verify finds last.

    Raises: ValueError for an `answer` in which it finds no mathematics.
    """
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the data set's answer {answer!r} is no mathematics; score it with 'exact' or 'match'")
    settled = final_answer(reply)
    given = parse(reply if settled == reply.strip() else f"\\boxed{{{settled}}}", parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


is_same_math("\\boxed{x^2+2x+1}", "(x+1)^2")
