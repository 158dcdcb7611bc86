"""The campaign: draws kinds of faults in turn, makes tries until the time is over, and counts their
findings.
"""

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.faults.across_hosts import killed_across_hosts
from benchmarks.faults.damage import DamagedRuns
from benchmarks.faults.disks import full_disks
from benchmarks.faults.in_runs import (
    killed_runs,
    killed_simulators,
    lost_fork_servers,
    paused_runs,
    stopped_runs,
)
from benchmarks.faults.leftovers import become_subreaper
from benchmarks.faults.one_try import Skipped, Try
from benchmarks.faults.sandboxes import dying_sandboxes
from benchmarks.faults.sockets import fuzzed_endpoints, fuzzed_hosts

Fault: TypeAlias = Callable[[Try], None]


def kinds_of_faults(folder: Path) -> dict[str, Fault]:
    """Return every kind of fault by name. `folder` holds the files that tries of one kind share."""
    return {
        "killed_simulators": killed_simulators,
        "killed_runs": killed_runs,
        "stopped_runs": stopped_runs,
        "paused_runs": paused_runs,
        "killed_across_hosts": killed_across_hosts,
        "lost_fork_servers": lost_fork_servers,
        "full_disks": full_disks,
        "damaged_checkpoints": DamagedRuns(folder),
        "fuzzed_hosts": fuzzed_hosts,
        "fuzzed_endpoints": fuzzed_endpoints,
        "dying_sandboxes": dying_sandboxes,
    }


@dataclass
class Campaign:
    """Makes tries, one after the other, and sums their findings.

    Every round draws an order of all kinds, so that an interrupted campaign has tried each about
    equally often.
    """

    seed: int
    kinds: Sequence[str]
    tries: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    lost_episodes: int = 0
    lost_metric_lines: int = 0
    left_behind: int = 0

    def run(self, minutes: float, rounds: int | None) -> None:
        """Make tries until `minutes` are over or every kind was tried `rounds` times.

        Prints a line for each.
        """
        become_subreaper()
        until = time.monotonic() + 60 * minutes
        root = Path(tempfile.mkdtemp(prefix="vla_rl_faults_"))
        faults = kinds_of_faults(root)
        try:
            for number, kind in self._in_rounds(rounds):
                if time.monotonic() >= until:
                    break
                self._try(number, kind, faults[kind], root / f"{number:04d}-{kind}")
        finally:
            if self.failures.total():
                print(f"the folders of tries that failed are kept in {root}", flush=True)
            else:
                shutil.rmtree(root, ignore_errors=True)

    def figures(self) -> dict[str, object]:
        """Return the sums for the last line."""
        by_kind = {
            kind: {"tries": self.tries[kind], "failures": self.failures[kind]}
            for kind in self.kinds
        }
        return {
            "tries": self.tries.total(),
            "failures": self.failures.total(),
            "lost_episodes": self.lost_episodes,
            "lost_metric_lines": self.lost_metric_lines,
            "left_behind": self.left_behind,
            "skipped": self.skipped,
            "by_kind": by_kind,
            "seed": self.seed,
        }

    def _in_rounds(self, rounds: int | None) -> Iterator[tuple[int, str]]:
        dice, number, made = random.Random(self.seed), 0, 0
        while rounds is None or made < rounds:
            order = list(self.kinds)
            dice.shuffle(order)
            for kind in order:
                if kind not in self.skipped:
                    yield number, kind
                number += 1
            if len(self.skipped) == len(self.kinds):
                return
            made += 1

    def _try(self, number: int, kind: str, fault: Fault, folder: Path) -> None:
        folder.mkdir()
        case = Try(number, kind, random.Random(f"{self.seed}/{number}/{kind}"), folder)
        started = time.monotonic()
        try:
            fault(case)
        except Skipped as reason:
            self.skipped[kind] = str(reason)
            print(f"{number:4d} {kind}: skipped: {reason}", flush=True)
            return
        except Exception as error:  # an error in a try counts as a failure; the campaign continues
            case.broken.append(f"{type(error).__name__}: {error}")
        self._count(case)
        verdict = "FAILED" if case.has_failed else "ok"
        print(f"{number:4d} {kind}: {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
        if case.has_failed:
            print(case.words(), flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _count(self, case: Try) -> None:
        self.tries[case.kind] += 1
        self.failures[case.kind] += case.has_failed
        self.lost_episodes += case.lost_episodes
        self.lost_metric_lines += case.lost_metric_lines
        self.left_behind += len(case.left_behind)
