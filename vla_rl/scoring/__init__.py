"""Scorers of final answers, by name or by a function of your own. No torch.

Code that may hang runs in a sandbox.

exact          the answer and nothing else
match          the answer, ignoring case, punctuation and articles, as in question-answering
               benchmarks
math           the same number, expression, set or interval (math-verify)
code           a program that prints what its tests expect, in a sandbox
module:name    `def name(reply: str, row: dict) -> float`, in any importable module
"""

from vla_rl.scoring.scorers import (
    Score as Score,
    check_answer as check_answer,
    check_scorer as check_scorer,
    fields_read as fields_read,
    final_answer as final_answer,
    make_scorer as make_scorer,
)
