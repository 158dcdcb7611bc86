"""Updates/s of a run with held-out episodes beside it, over those of the same run without them.

    python -m benchmarks.held_out_background [--rounds 6] [--updates 60]

The toy policy is trained in three ways, in turn, with the same seed: `alone`; `beside` held-out
episodes; and `neighbour`, next to another run that has nothing to do with it. Training and its
simulator are pinned to the first core in all ways; the evaluator and its simulator, or the
neighbour, which are busy all the time, to the last: a core of its own. What `neighbour` loses is
lost to the machine (shared caches, memory and clock), not to us. With `--shared` nothing is pinned.
On a machine that others use, or with one core, the figure is theirs and not ours.

Keys of the last line: `updates_per_s_alone`, `updates_per_s_beside`; `loss_percent` (median over
the rounds, goal 3 with a core of its own), `neighbour_loss_percent`, the same next to the neighbour;
`cpu_loss_percent`, the rise of CPU seconds an update of the training process, which noise of the
machine moves less; `held_out_episodes_per_s`, `own_core`, `cores`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.interleaved import print_json_line, print_table, ratio_of, sample_in_turn

RECIPE: Final = [
    *(sys.executable, "-m", "vla_rl.recipes.train_toy", "--env-id", "vla_rl/toy_reach-v0"),
    *("--run.updates", "1000000", "--run.checkpoint-every", "1000000"),
    *("--simulators.num-envs", "1", "--group-size", "4", "--step-limit", "40"),
]
BACKGROUND: Final = ["--held-out.starts", "100000", "--held-out.every", "1000000"]
EVALUATOR: Final = "evaluator of we"
"""Name of the evaluator's process, as ps shows it."""

DEADLINE_S: Final = 120.0


@dataclass(frozen=True)
class Sample:
    """One measured stretch of a run."""

    updates_per_s: float
    cpu_s_per_update: float
    held_out_per_s: float


def measure(updates: int, way: str, *, pinned: bool) -> Sample:
    """Train in one of the ways; measure the updates that follow the first twenty."""
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        if way == "neighbour":
            other = stack.enter_context(_run(stack.enter_context(tempfile.TemporaryDirectory())))
            _pin(other, cores()[-1], pinned=pinned)
        run = stack.enter_context(_run(root, *(BACKGROUND if way == "beside" else [])))
        _pin(run, cores()[0], pinned=pinned)
        if way == "beside" and pinned:
            _pin_evaluator(run.pid, cores()[-1])
        _until(lambda: _num_lines(root, "metrics.jsonl") > 20)
        _until(lambda: way != "beside" or _num_lines(root, "held_out_choose.jsonl") > 0)
        first, episodes, cpu = (
            _updates(root),
            _num_lines(root, "held_out_choose.jsonl"),
            _cpu_s(run.pid),
        )
        _until(lambda: _updates(root)[0] >= first[0] + updates)
        last, cpu = _updates(root), _cpu_s(run.pid) - cpu
        episodes = _num_lines(root, "held_out_choose.jsonl") - episodes
    seconds, count = last[1] - first[1], last[0] - first[0]
    return Sample(count / seconds, cpu / count, episodes / seconds)


@contextmanager
def _run(root: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training run that ends with the block."""
    command = [*RECIPE, *options, "--run.root", root]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def _pin(run: subprocess.Popen[bytes], core: int, *, pinned: bool) -> None:
    """Pin a run that has just started, before it starts processes, which inherit that."""
    if pinned:
        os.sched_setaffinity(run.pid, {core})


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    """Measure the three ways in turn and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=60, help="updates of a stretch")
    parser.add_argument("--shared", action="store_true", help="pin nothing to a core")
    args = parser.parse_args()
    pinned = not args.shared and len(cores()) > 1
    found: dict[str, list[Sample]] = {"alone": [], "beside": [], "neighbour": []}

    def rate(way: str) -> float:
        found[way].append(measure(args.updates, way, pinned=pinned))
        return found[way][-1].updates_per_s

    samples = sample_in_turn({way: partial(rate, way) for way in found}, args.rounds)
    cpu = {way: [sample.cpu_s_per_update for sample in found[way]] for way in found}
    figures = {
        "updates_per_s_alone": statistics.median(samples["alone"]),
        "updates_per_s_beside": statistics.median(samples["beside"]),
        "loss_percent": 100.0 * (1.0 - ratio_of(samples, "beside", "alone")),
        "neighbour_loss_percent": 100.0 * (1.0 - ratio_of(samples, "neighbour", "alone")),
        "cpu_loss_percent": 100.0 * (ratio_of(cpu, "beside", "alone") - 1.0),
        "held_out_episodes_per_s": statistics.median(
            each.held_out_per_s for each in found["beside"]
        ),
        "own_core": pinned,
        "cores": len(cores()),
    }
    print_table("Held-out episodes beside training", figures)
    if not pinned:
        print("the evaluator had no core of its own, so its loss says little", file=sys.stderr)
    print_json_line(figures)


if __name__ == "__main__":
    main()
