"""What docs/rollout.md shows is what runs."""

import asyncio
import re
from pathlib import Path
from typing import Any

from rollout_fakes import CountingEngine, LatencyPool

from vla_rl.rollout import SchedulerState
from vla_rl.types import Group
from vla_rl.util.tasks import run_in_simulated_time

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"


def test_the_agent_and_the_training_loop_of_the_page_run_as_shown() -> None:
    shown: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), shown)

    async def main() -> tuple[SchedulerState, list[Group]]:
        engine, trained = CountingEngine(), list[Group]()

        async def learn(groups: list[Group]) -> None:
            trained.extend(groups)
            engine.weight_version += 1

        async with asyncio.timeout(3600), engine.batcher:
            return await shown["train"](LatencyPool(8), engine, learn, 3), trained

    state, trained = run_in_simulated_time(main())
    assert state.version == 3
    assert state.ledger.trained == 3 * 4 * 8
    assert {group.task for group in trained} == {"libero_goal/3"}
    assert all(0.0 < group.success_rate < 1.0 for group in trained)
