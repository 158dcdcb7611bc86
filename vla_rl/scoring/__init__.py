"""How a final answer is judged: by name, or by a function of one's own; what may hang runs where it can be killed. No torch.

exact          the answer, and nothing else than the answer
match          the answer but for case, punctuation and articles, as question-answering benchmarks count
math           the same number, expression, set or interval (math-verify)
code           a program that prints what its tests expect, in a sandbox
module:name    `def name(reply: str, row: dict) -> float`, anywhere that can be imported
"""

from vla_rl.scoring.answers import final_answer
from vla_rl.scoring.scorers import SCORER_NAMES, Score, Scorer, code_tests, make_scorer

__all__ = ["SCORER_NAMES", "Score", "Scorer", "code_tests", "final_answer", "make_scorer"]
