"""Check what a reply settles on: its final answer, and its last program."""

import pytest
from durations import assert_grows_in_proportion

from vla_rl.scoring import final_answer
from vla_rl.scoring.scorers import find_last_program


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("I think <answer>7</answer>, no: <answer> 8 </answer>", "8"),
        (r"so \boxed{\frac{1}{2}} and then \boxed{x^{2}}", "x^{2}"),
        (r"\boxed{3", r"\boxed{3"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("Thinking.\nThe answer is: **Graz**", "Graz"),
        ("Final answer: 12", "12"),
        ("  42 \n", "42"),
    ],
)
def test_the_final_answer_is_what_the_reply_settles_on(reply: str, answer: str) -> None:
    assert final_answer(reply) == answer


@pytest.mark.parametrize(
    "pattern",
    ["\n", "<answer>", "<answer></answer", "\\boxed{", "Answer: x *", "#### \t", "answer \t* is"],
)
def test_the_work_for_an_answer_grows_in_proportion_to_the_reply(pattern: str) -> None:
    assert_grows_in_proportion(lambda size: final_answer(pattern * (size // len(pattern)) + "4 2"))


@pytest.mark.parametrize(
    ("begin", "pattern", "end"),
    [
        ("", "```", ""),
        ("```\n", "x", ""),
        ("```\n```", " ", "x"),
        ("", "```\n", "x"),
        ("", "`", "x`"),
    ],
)
def test_the_work_for_a_program_grows_in_proportion_to_the_reply(
    begin: str, pattern: str, end: str
) -> None:
    assert_grows_in_proportion(
        lambda size: find_last_program(begin + pattern * (size // len(pattern)) + end)
    )


def test_an_answer_after_many_openings_is_found() -> None:
    assert final_answer("\n" * 50_000 + "4 2") == "4 2"
    assert final_answer("<answer>" * 3 + "7</answer>") == "<answer><answer>7"
    assert final_answer("<answer>7</answer><answer>8") == "7"


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("Install it:\n```bash\npip install x\n```\nthen\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```Python\nprint(1)\n```", "print(1)\n"),
        ("```py\nprint(1)\n```\nbetter:\n```python3\nprint(2)\n```\n", "print(2)\n"),
        ("```\nprint(1)\n```\n```\nprint(2)\n```\n```text\n2\n```", "print(2)\n"),
        ("1. so:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
        ("````python\n# as in\n```\nprint(1)\n````", "# as in\n```\nprint(1)\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\nprint(1)```", "print(1)\n"),
        ("```python\nprint(1)\n```.", "print(1)\n"),
        ("```python\nprint(1)\n``` \t; \n", "print(1)\n"),
        ("```python\nx = 'a\u2028b'\n```", "x = 'a\u2028b'\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_program_is_the_last_block_of_python(reply: str, program: str) -> None:
    assert find_last_program(reply) == program
