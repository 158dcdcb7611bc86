"""Faults in a run over several hosts, for which network namespaces stand in.

    control: the run, two ranks  ──►  host1, host2: `vla-rl host` ─► monitor, rollout and store ─► simulators

Any of these processes is killed, each at a random moment. There is no relay to kill: what is on a
host talks to the run directly.
"""

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Final

import psutil

from benchmarks.faults.leftovers import ENDS_WITHIN_S, descendants, nothing_left
from benchmarks.faults.one_try import Skipped, Try
from benchmarks.faults.targets import get_environment
from benchmarks.faults.toy_run import ToyRun, check_books, tail
from benchmarks.hosts.namespace_hosts import NamespaceRunner, start_hosts, write_list
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces

_UPDATES: Final = 24
_MOST_STRIKES: Final = 5
_LOST_AFTER_S: Final = 20.0
"""A busy machine holds up any thread for seconds. A process that dies closes its connections, which
is seen at once."""

_ARGUMENTS: Final = (
    *("--learner.ranks", "2"),
    # all strikes may hit the same episode, or the ranks before a checkpoint
    *("--scheduler.max-attempts", str(_MOST_STRIKES + 4)),
    *("--learner.max-restarts", str(_MOST_STRIKES + 1)),
)


def killed_across_hosts(case: Try) -> None:
    """Kill hosts, what runs on them, ranks and the run itself at random moments; it has to go on."""
    with nothing_left(case), contextlib.ExitStack() as stack:
        try:
            control, *others = stack.enter_context(network_namespaces(3))
        except NamespacesRefused as reason:
            raise Skipped(str(reason)) from None
        with (
            start_hosts(others, case.folder, _LOST_AFTER_S, get_environment(case)) as hosts,
            control.entered(),
        ):
            _Strikes(case, hosts).run()
            for host in hosts:
                _expect_empty(case, host.namespace, besides=[host.server.pid])
        for namespace in (control, *others):
            _expect_empty(case, namespace)


class _Strikes:
    """A run to its end, and what happens to it meanwhile."""

    def __init__(self, case: Try, hosts: list[NamespaceRunner]) -> None:
        self._case, self._dice, self._hosts = case, case.dice, hosts
        self._arguments = (*_ARGUMENTS, "--cluster.hosts", str(write_list(case.folder, hosts)))
        self._happened: list[str] = []

    def run(self) -> None:
        """Make the run, strike, and check its books."""
        with contextlib.ExitStack() as runs:
            run = runs.enter_context(self._started(()))
            for _ in range(self._dice.randint(2, _MOST_STRIKES)):
                self._wait_for_a_moment(run)
                strike = self._dice.choice(
                    (self._kill_host, self._kill_on_host, self._kill_rank, self._kill_run)
                )
                if strike(run):
                    resuming = () if run.folder is None else ("--resume", str(run.folder))
                    run = runs.enter_context(self._started(resuming))
            status = run.until_ended()
            told = f"after {', '.join(self._happened)}:\n{tail(run, 30)}"
            self._case.expect(status == 0, f"exit status {status}, expected 0, {told}")
            self._case.expect("Traceback" not in run.output(), f"a traceback {told}")
            check_books(self._case, run.folder, _UPDATES)

    def _started(self, resuming: Sequence[str]) -> ToyRun:
        root = self._case.folder / "runs"
        return ToyRun(self._case, _UPDATES, *self._arguments, *resuming, root=root)

    def _wait_for_a_moment(self, run: ToyRun) -> None:
        """Wait for a random moment: while all start, or between any two updates."""
        if self._dice.random() < 0.3:
            time.sleep(self._dice.uniform(0.0, 10.0))
        else:
            run.until_update(self._dice.randint(1, _UPDATES // 2))
            time.sleep(self._dice.expovariate(1 / 0.5))

    def _kill_host(self, run: ToyRun) -> bool:
        """Kill `vla-rl host` on one host, and start it again after some seconds."""
        # all hosts must answer when a run starts: one that is killed then ends it with one error
        run.until_update(1)
        host = self._dice.choice(self._hosts)
        self._happened.append(f"SIGKILL of {host.name}")
        host.kill()
        time.sleep(self._dice.uniform(0.0, 3.0))
        host.begin()
        host.until_ready()
        return False

    def _kill_on_host(self, run: ToyRun) -> bool:
        """Kill the monitor, the rollout with its episode store, the fork server or a simulator of a host."""
        host = self._dice.choice(self._hosts)
        self._kill_one(descendants(host.server.pid), f"on {host.name}")
        return False

    def _kill_rank(self, run: ToyRun) -> bool:
        """Kill a process of the run but the run itself: these are its ranks."""
        self._kill_one(descendants(run.process.pid), "of the run")
        return False

    def _kill_run(self, run: ToyRun) -> bool:
        """Kill the run."""
        self._happened.append("SIGKILL of the run")
        run.send(signal.SIGKILL)
        run.process.wait()
        return True

    def _kill_one(self, processes: list[psutil.Process], where: str) -> None:
        if not processes:
            return
        victim = self._dice.choice(processes)
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            self._happened.append(f"SIGKILL of {' '.join(victim.cmdline()[3:])!r} {where}")
            victim.kill()


def _expect_empty(case: Try, namespace: NamespaceHost, besides: Sequence[int] = ()) -> None:
    """Expect that the processes in a namespace end soon."""
    until = time.monotonic() + ENDS_WITHIN_S
    while (left := set(namespace.processes()) - set(besides)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(psutil.Process(pid).cmdline())[:200]
            case.left_behind.append(f"process {pid} in {namespace.address}: {words}")
