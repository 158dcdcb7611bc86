"""What docs/language.md shows is what runs."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "language.md"


def test_the_page_makes_a_policy_and_talks_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    talks, fills_in, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(talks, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    num_prompt = len(
        names["policy"].render(
            [names["Message"](role="user", content="What is 3+4?")], [names["calc"]]
        )
    )
    assert printed.startswith(f"{num_prompt} (16,) (16,) length\n")
    exec(compile(fills_in, str(PAGE), "exec"), names)
    assert re.match(r"(Saturday|Sunday) -\d+\.\d+ %llguidance", capsys.readouterr().out)
