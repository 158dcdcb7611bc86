"""What docs/language.md shows is what runs."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import write_tiny_vision

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


async def test_the_page_shows_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n# look\.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, str(PAGE), "exec"), names)
    await names["look"](str(write_tiny_vision(tmp_path / "tiny")))
    # 112 x 168 pixels are 4 x 6 tokens, after the role and the mark before an image
    assert re.match(r"\d+ \(\d+,\) ", capsys.readouterr().out)
