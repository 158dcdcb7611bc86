"""Cost of arrays from an actor on another host, against bare ZeroMQ with CURVE and Ray's store.

`python -m benchmarks.hosts.wire [--rounds 7] [--ray-python PATH]`; the last line is JSON:

    wire_cpu_vs_bare_curve   CPU seconds of all processes per GB, ours over bare ZeroMQ's; goal 1.25
    wire_vs_ray              CPU seconds per GB of Ray's object store between two nodes, which does
                             not encrypt, over ours; goal 2.5; null without Ray, with `ray_reason`
    wire_cpu_s_per_gb        ours; bare_cpu_s_per_gb, ray_cpu_s_per_gb and ray_mb_per_s beside it
    wire_mb_per_s            {calls in flight: MB/s}; bare_mb_per_s beside it
    small_call_us            a call without arrays and back

Two network namespaces stand in for the hosts. Each message is one array of 3 MB: the pixels of 20
decisions. Ours and bare ZeroMQ take turns, round after round, with 1, 4 and 16 messages in flight;
a ratio is the median of the rounds' ratios.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import uvloop

from benchmarks.hosts.bare_curve import BareCurve
from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from benchmarks.hosts.ray_store import NoRay, ray_cpu_s_per_gb
from benchmarks.interleaved import print_json_line, print_table
from vla_rl.actors import Actor, RemoteHost, Runtime, make_keys, read_keys, read_public_key

NUM_BYTES: Final = 20 * 224 * 224 * 3
IN_FLIGHT: Final = (1, 4, 16)
_MESSAGES: Final = 48
_SMALL_CALLS: Final = 500
_GB, _MB = 1e9, 1e6


class Source(Actor):
    """Has pixels."""

    def __init__(self) -> None:
        self._pixels = np.random.default_rng(0).integers(0, 255, NUM_BYTES, np.uint8)

    async def pixels(self) -> np.ndarray:
        """Return all of them."""
        return self._pixels

    async def number(self) -> int:
        """Return a number."""
        return 7


class Figures:
    """Wall time and CPU time of one way, by calls in flight."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids)]
        self._round_s = 0.0
        self.cpu_s: list[float] = []
        """CPU seconds per GB, one entry for each round."""
        self.mb_per_s: dict[int, list[float]] = {number: [] for number in IN_FLIGHT}

    @contextlib.contextmanager
    def measured(self, in_flight: int) -> Iterator[None]:
        """Measure a block that receives `_MESSAGES` messages."""
        cpu_began, began = self._cpu_now_s(), time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - began
        self.mb_per_s[in_flight].append(_MESSAGES * NUM_BYTES / _MB / elapsed_s)
        self._round_s += self._cpu_now_s() - cpu_began

    def end_round(self) -> None:
        """Add up the CPU time of a round."""
        self.cpu_s.append(self._round_s / (len(IN_FLIGHT) * _MESSAGES * NUM_BYTES / _GB))
        self._round_s = 0.0

    def rates(self) -> dict[str, float]:
        """Return the median MB/s by calls in flight."""
        return {str(n): round(statistics.median(found), 1) for n, found in self.mb_per_s.items()}

    def _cpu_now_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return float(sum(entry.user + entry.system for entry in times))


def serve_actors(host: NamespaceHost, folder: Path) -> tuple["subprocess.Popen[str]", RemoteHost]:
    """Start a host server in a namespace; return it and how to place an actor there."""
    make_keys(folder)
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", f"tcp://{host.address}:0"]
    command += ["--keys", str(folder / "server.key"), "--allow", str(folder / "client.pub")]
    server = host.popen([*command, "--lost-after", "60"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    placement = RemoteHost(
        address=server.stdout.readline().split()[-1],
        server_public_key=read_public_key(folder / "server.pub"),
        client_keys=read_keys(folder / "client.key"),
        lost_after_s=60.0,
    )
    return server, placement


async def receive_pixels(source: Source, number: int, in_flight: int) -> None:
    """Receive this many arrays, with `in_flight` calls at a time."""

    async def caller() -> None:
        for _ in range(number // in_flight):
            await source.pixels()

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(caller())


async def small_call_us(source: Source) -> float:
    """Return the median time of a call without arrays (µs)."""
    times = []
    for _ in range(_SMALL_CALLS):
        began = time.perf_counter()
        await source.number()
        times.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(times), 1)


async def measure(remote: NamespaceHost, folder: Path, rounds: int) -> dict[str, object]:
    """Measure ours and bare ZeroMQ; this thread is in the other namespace."""
    server, placement = serve_actors(remote, folder)
    async with Runtime() as runtime:
        source = await runtime.spawn(Source, placement=placement)
        ours = Figures(server.pid, runtime.info(source).pid)
        with BareCurve(remote, NUM_BYTES) as plain:
            bare = Figures(plain.pid)
            await receive_pixels(source, 4, 1)
            for number in range(1, rounds + 1):
                for in_flight in IN_FLIGHT:
                    with bare.measured(in_flight):
                        plain.receive(_MESSAGES, in_flight)
                    with ours.measured(in_flight):
                        await receive_pixels(source, _MESSAGES, in_flight)
                bare.end_round()
                ours.end_round()
                figures = f"ours {ours.cpu_s[-1]:.2f}, bare {bare.cpu_s[-1]:.2f} CPU s per GB"
                print(f"round {number}/{rounds}: {figures}", file=sys.stderr, flush=True)
        latency_us = await small_call_us(source)
    server.terminate()
    server.wait()
    ratios = [one / other for one, other in zip(ours.cpu_s, bare.cpu_s, strict=True)]
    return {
        "wire_cpu_vs_bare_curve": round(statistics.median(ratios), 3),
        "wire_cpu_s_per_gb": round(statistics.median(ours.cpu_s), 3),
        "bare_cpu_s_per_gb": round(statistics.median(bare.cpu_s), 3),
        "wire_mb_per_s": ours.rates(),
        "bare_mb_per_s": bare.rates(),
        "small_call_us": latency_us,
    }


def compare_with_ray(
    python: Path, near: NamespaceHost, remote: NamespaceHost, figures: dict[str, object]
) -> dict[str, object]:
    """Return Ray's figures, or the reason why there are none."""
    try:
        cpu_s, mb_per_s = ray_cpu_s_per_gb(python, near, remote, NUM_BYTES, 4 * _MESSAGES)
    except NoRay as reason:
        return {"wire_vs_ray": None, "ray_reason": str(reason)}
    ours_s = figures["wire_cpu_s_per_gb"]
    assert isinstance(ours_s, float)
    return {
        "wire_vs_ray": round(cpu_s / ours_s, 2),
        "ray_cpu_s_per_gb": round(cpu_s, 2),
        "ray_mb_per_s": round(mb_per_s, 1),
    }


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--ray-python",
        type=Path,
        default=Path(sys.executable),
        help="interpreter with Ray and NumPy (default: this one)",
    )
    options = parser.parse_args()
    try:
        with (
            network_namespaces(2) as (near, remote),
            tempfile.TemporaryDirectory(prefix="vla_rl-bench-") as folder,
            near.entered(),
        ):
            figures = uvloop.run(measure(remote, Path(folder) / "keys", options.rounds))
            figures |= compare_with_ray(options.ray_python, near, remote, figures)
    except NamespacesRefused as reason:
        figures = {"wire_cpu_vs_bare_curve": None, "reason": str(reason)}
    print_table("the wire between hosts", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
