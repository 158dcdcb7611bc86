"""The summary of a run counts by task, by outcome and by node; what is unknown is a dash."""

import io

from rich.console import Console

from vla_rl.reporting.progress import Snapshot, TaskTally
from vla_rl.reporting.summary import print_summary


def words(snapshot: Snapshot, num_filtered: int = 0, dropped: dict[str, int] | None = None) -> str:
    """Return the summary with single spaces and without lines of boxes."""
    console = Console(file=io.StringIO(), width=120)
    print_summary(snapshot, num_filtered, dropped or {}, console)
    text = console.file.getvalue()
    rows = (
        "".join(" " if ord(each) > 0x2000 else each for each in row) for row in text.split("\n")
    )
    return "\n".join(" ".join(row.split()) for row in rows)


def snapshot(elapsed_s: float = 10.0, **others) -> Snapshot:
    fields = {
        "num_updates": 5,
        "update": 4,
        "elapsed_s": elapsed_s,
        "eta_s": None,
        "num_episodes": 1200,
        "success_rate": None,
        "mean_return": None,
        "env_steps": 5000,
        "env_steps_per_s": 0.0,
        "policy_busy_share": None,
        "critical_path": "",
    } | others
    return Snapshot(**fields)


def test_a_run_is_counted_by_outcome() -> None:
    found = words(snapshot(), num_filtered=3, dropped={"stale": 2, "died": 1})
    assert "updates 4/5" in found
    assert "episodes 1,200" in found
    assert found.index("filtered 3") < found.index("dropped (died) 1") < found.index("(stale) 2")
    assert "env steps/s 500.0" in found


def test_tasks_have_their_rates_and_one_line_together() -> None:
    tasks = {"b": TaskTally(4, 1, 2.0, True), "a": TaskTally(4, 3, 6.0, True)}
    found = words(snapshot(tasks=tasks))
    assert found.index("a 4 3 75.0%") < found.index("b 4 1 25.0%") < found.index("all 8 4 50.0%")


def test_a_task_of_unknown_success_does_not_count_in_the_rate_of_all() -> None:
    tasks = {"a": TaskTally(4, 3, 6.0, True), "silent": TaskTally(4, 0, 2.0, False)}
    found = words(snapshot(tasks=tasks))
    assert "silent 4 - -" in found
    assert "all 8 3 75.0%" in found


def test_nodes_stand_by_their_time() -> None:
    found = words(snapshot(total_node_seconds={"update": 2.5, "rollout": 9.0}))
    assert found.index("rollout 9.00 90%") < found.index("update 2.50 25%")


def test_a_run_that_ended_at_once_divides_by_nothing() -> None:
    found = words(snapshot(elapsed_s=0.0, total_node_seconds={"update": 0.0}))
    assert "env steps/s 0.0" in found
    assert "update 0.00 0%" in found
