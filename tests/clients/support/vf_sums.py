"""An environment as users of verifiers write them: nothing here knows of vla_rl."""

import verifiers as vf
from datasets import Dataset


def add(left: int, right: int) -> int:
    """Adds two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


def is_right(completion, answer, **kwargs) -> float:  # type: ignore[no-untyped-def]
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return float(str(content).strip() == answer)


def load_environment(num_rows: int = 3, **kwargs) -> vf.Environment:  # type: ignore[no-untyped-def]
    rows = [
        {"question": f"{row}+{row}=?", "answer": str(2 * row)} for row in range(1, num_rows + 1)
    ]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[is_right]),
        tools=[add],
        max_turns=4,
        **kwargs,
    )
