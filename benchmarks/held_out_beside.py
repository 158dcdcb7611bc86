"""Updates/s of a run with held-out episodes beside it, over those of the same run without them.

    python -m benchmarks.held_out_beside [--rounds 5] [--seconds 10]

Both ways train the toy policy, one after the other in every round. Training and its simulator are
pinned to the first core, in both ways; the evaluator and its simulator, which are busy all the
time, to the second: a core of its own. With `--shared` nothing is pinned. On a machine that others
use, or with one core, the figure is theirs and not ours.

Keys of the last line: `updates_per_s_alone`, `updates_per_s_beside`, `loss_percent` (median over the
rounds, goal 3 with a core of its own), `held_out_episodes_per_s`, `own_core`, `cores`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.interleaved import print_json_line, print_table, ratio_of, sample_in_turn

RECIPE: Final = [
    *(sys.executable, "-m", "vla_rl.recipes.train_toy", "--env-id", "vla_rl/toy_reach-v0"),
    *("--run.updates", "1000000", "--run.checkpoint-every", "1000000"),
    *("--simulators.num-envs", "1", "--group-size", "4", "--step-limit", "40"),
]
BESIDE: Final = ["--held-out.starts", "100000", "--held-out.every", "1000000"]
EVALUATOR: Final = "evaluator of we"
"""Name of the evaluator's process, as ps shows it."""

DEADLINE_S: Final = 120.0


def measure(seconds: float, *, beside: bool, pinned: bool, rates: list[float]) -> float:
    """Return the updates/s of a run; adds the evaluator's episodes/s to `rates`."""
    with tempfile.TemporaryDirectory() as root:
        command = [*RECIPE, *(BESIDE if beside else []), "--run.root", root]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if pinned:
                os.sched_setaffinity(run.pid, {cores()[0]})
            if beside and pinned:
                _pin_evaluator(run.pid, cores()[-1])
            _until(lambda: _num_lines(root, "metrics.jsonl") > 20)
            _until(lambda: not beside or _num_lines(root, "held_out.jsonl") > 0)
            first, episodes = _updates(root), _num_lines(root, "held_out.jsonl")
            time.sleep(seconds)
            last = _updates(root)
            if beside:
                rates.append((_num_lines(root, "held_out.jsonl") - episodes) / seconds)
        finally:
            run.kill()
            run.wait()
    return (last[0] - first[0]) / (last[1] - first[1])


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _pin_evaluator(parent: int, core: int) -> None:
    """Pin the evaluator to a core, before it forks its simulators, which inherit that."""
    _until(lambda: _child(parent) is not None)
    evaluator = _child(parent)
    assert evaluator is not None
    for thread in Path(f"/proc/{evaluator}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def _child(parent: int) -> int | None:
    """Return the evaluator among the children of a process."""
    for thread in Path(f"/proc/{parent}/task").iterdir():
        for child in (thread / "children").read_text().split():
            try:
                if Path(f"/proc/{child}/comm").read_text().strip() == EVALUATOR:
                    return int(child)
            except OSError:  # it ended meanwhile
                continue
    return None


def _until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run did not come up within {DEADLINE_S:g} s")
        time.sleep(0.005)


def _lines(root: str, name: str) -> list[bytes]:
    paths = list(Path(root).glob(f"*/{name}"))
    return paths[0].read_bytes().split(b"\n")[:-1] if paths else []


def _num_lines(root: str, name: str) -> int:
    return len(_lines(root, name))


def _updates(root: str) -> tuple[float, float]:
    """Return the newest update and its time."""
    line = json.loads(_lines(root, "metrics.jsonl")[-1])
    return line["update"], line["wall_time_s"]


def main() -> None:
    """Measure both ways in turn and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--shared", action="store_true", help="pin nothing to a core")
    args = parser.parse_args()
    pinned = not args.shared and len(cores()) > 1
    rates: list[float] = []
    samples = sample_in_turn(
        {
            "alone": lambda: measure(args.seconds, beside=False, pinned=pinned, rates=rates),
            "beside": lambda: measure(args.seconds, beside=True, pinned=pinned, rates=rates),
        },
        args.rounds,
    )
    figures = {
        "updates_per_s_alone": statistics.median(samples["alone"]),
        "updates_per_s_beside": statistics.median(samples["beside"]),
        "loss_percent": 100.0 * (1.0 - ratio_of(samples, "beside", "alone")),
        "held_out_episodes_per_s": statistics.median(rates),
        "own_core": pinned,
        "cores": len(cores()),
    }
    print_table("Held-out episodes beside training", figures)
    if not pinned:
        print("the evaluator had no core of its own, so its loss says little", file=sys.stderr)
    print_json_line(figures)


if __name__ == "__main__":
    main()
