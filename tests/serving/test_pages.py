"""The page about serving does what it says."""

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from websockets.asyncio.client import connect

from vla_rl.serving.openpi_messages import decode_message, encode_message

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, name: str) -> str:
    """The text of the file `name` in a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"```python\n# {name}\.py\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


async def test_a_family_of_your_own_is_served_from_python(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {name: ModuleType(name) for name in ("my_family", "serve_mine")}
    for name, page in (("my_family", "add_a_policy_family.md"), ("serve_mine", "serving.md")):
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(compile(block(page, name), f"{page} {name}", "exec"), modules[name].__dict__)
    policy = modules["my_family"].CnnPolicy(seed=0)
    serving = asyncio.create_task(modules["serve_mine"].serve_mine(policy, port=0))
    address = ""
    while not address:
        await asyncio.sleep(0.01)
        assert not serving.done()
        address = capsys.readouterr().out.partition("serving at ")[2].strip()
    async with connect(address, compression=None) as client:
        assert decode_message(await client.recv())["policy"] == "mine"  # type: ignore[arg-type]
        await client.send(encode_message({"camera": np.zeros((32, 32, 3), np.uint8)}))
        reply = await client.recv()
        assert isinstance(reply, bytes), reply
    serving.cancel()
    await asyncio.wait((serving,))
    assert decode_message(reply)["actions"].shape == (4, 2)
