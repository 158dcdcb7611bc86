"""Runs what docs/endpoint.md shows for a client, as it is shown."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "endpoint.md"


def answer_of(name: str, question: str) -> str:
    """The answer of the agent that the page shows under a name, with the policy that adds."""
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, Any] = {"__name__": name}
    exec(compile(blocks[name], name, "exec"), names)
    url, key = os.environ["VLA_RL_BASE_URL"], os.environ["VLA_RL_CALCULATOR"]
    answer: str = asyncio.run(names["answer"](question, url, key))
    return answer
