"""CPU time of an env step of LIBERO: robosuite's own stepping, hf-libero's vector env, and ours.

    python -m benchmarks.libero_throughput --assets /data/libero/assets

Every way runs in a process of its own and all take turns, round after round, so that a noisy
machine disturbs them equally. CPU time is measured (all threads, and child processes), so figures
are per fully used core. The original is LIBERO's own environment in its usual form: both its
cameras rendered at every control step, here at 224 pixels; siiRL's way is hf-libero's
SubprocVectorEnv with one environment. Ours runs the same actions in chunks of 8 through
`run_chunk`, with success checks and observations. Stepping alone is compared without cameras; its
lower bound is 25 bare `mj_step`s with the controls of the same steps. Without `--assets` the
figures that need LIBERO's own meshes are null.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from benchmarks.libero_ways import WAYS

SUITE, TASK_ID = "libero_object", 0
POLICY_SIZE = 84
"""Side of the images of the policy that ships."""


class Way:
    """One way of stepping, in a process of its own.

    Args:
        name: one of `WAYS`.
        arguments: arguments of its builder.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, arguments), name=name)
        self._process.start()
        theirs.close()
        self._receive()

    def __enter__(self) -> "Way":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.send("stop")
        self._process.join(10)
        self._process.kill()

    def measure(self) -> Any:
        """Return the figure (for "stepping", the figures) of one round."""
        self._pipe.send("run")
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"{self._process.name} ended with exit code {self._process.exitcode}."
            ) from None


def _serve(pipe: Connection, name: str, arguments: dict[str, Any]) -> None:
    run = WAYS[name](**arguments)
    run()  # warm up
    pipe.send("ready")
    while pipe.recv() == "run":
        pipe.send(run())
    os._exit(0)  # robosuite's render context prints tracebacks when it is freed


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", help="folder of LIBERO's own assets")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    seconds = _measure(options.assets, options.rounds)
    figures = _figures(seconds)
    rates = {
        f"{name}, env steps/s per core": 1.0 / value
        for name, value in seconds.items()
        if value and "step" in name
    }
    others = {name: value for name, value in seconds.items() if "step" not in name}
    print_table(f"{SUITE} task {TASK_ID}", {**rates, **others, **figures})
    print_json_line(figures)


def _measure(real: str | None, rounds: int) -> dict[str, float | None]:
    """Return CPU seconds an env step, milliseconds a reset and megabytes a worker, by the name of
    the measurement.
    """
    task = {"suite": SUITE, "task_id": TASK_ID}
    figures: dict[str, float | None] = {}
    with Way("stepping", **task, assets=real or "stand-ins") as way:
        bare = [way.measure() for _ in range(rounds)]
    figures.update(
        {
            f"stepping: {name} step": statistics.median(turn[name] for turn in bare)
            for name in bare[0]
        }
    )
    groups: list[dict[str, tuple[str, dict[str, Any]]]] = [
        {
            "stand-in: original step 2x224": (
                "original step drawn",
                {**task, "assets": "stand-ins", "cameras": 2},
            ),
            "stand-in: fast step 1x224": (
                "our step drawn",
                {**task, "assets": "stand-ins", "cameras": 1, "mode": "fast"},
            ),
            "stand-in: fast step 2x224": (
                "our step drawn",
                {**task, "assets": "stand-ins", "cameras": 2, "mode": "fast"},
            ),
        },
    ]
    if real is not None:
        original = {**task, "assets": real}
        ours = {**original, "mode": "exact"}
        groups.append(
            {
                "real: original step 2x224": ("original step drawn", {**original, "cameras": 2}),
                "real: original step 1x224": ("original step drawn", {**original, "cameras": 1}),
                "real: SubprocVectorEnv step 2x224": ("siirl step drawn", original),
                "real: exact step 1x224": ("our step drawn", {**ours, "cameras": 1}),
                "real: exact step 2x224": ("our step drawn", {**ours, "cameras": 2}),
            }
        )
        fast = {**original, "size": POLICY_SIZE}
        groups.append(
            {
                "real: fast step 2x84": ("our step drawn", {**fast, "cameras": 2, "mode": "fast"}),
                "real: fast step 2x84, whole meshes": ("fast step with whole meshes", fast),
            }
        )
    for group in groups:
        with ExitStack() as stack:
            ways = {
                label: stack.enter_context(Way(name, **arguments))
                for label, (name, arguments) in group.items()
            }
            figures.update(
                measure_in_turn({label: way.measure for label, way in ways.items()}, rounds)
            )
    with Way("reset", **task, assets=real or "stand-ins") as way:
        figures["reset_ms"] = statistics.median(way.measure() for _ in range(rounds))
    for size in (POLICY_SIZE, 224):
        figures[f"picture_difference_{size}"] = None
        if real is not None:
            with Way("image differences", **task, assets=real, size=size) as way:
                figures[f"picture_difference_{size}"] = way.measure()["mean"]
    for key, assets in (("worker_mb_placeholder", "stand-ins"), ("worker_mb_real", real)):
        figures[key] = None
        if assets is not None:
            mode = "fast" if assets == "stand-ins" else "exact"
            with Way("worker memory", **task, assets=assets, mode=mode) as way:
                figures[key] = way.measure()
            print(f"{key}: {figures[key]:.4g}", file=sys.stderr, flush=True)
    return figures


def _figures(seconds: dict[str, float | None]) -> dict[str, float | None]:
    def ratio(slow: str, fast: str) -> float | None:
        first, second = seconds.get(slow), seconds.get(fast)
        return first / second if first and second else None

    return {
        "exact_real_1x224_vs_original": ratio(
            "real: original step 2x224", "real: exact step 1x224"
        ),
        "exact_real_2x224_vs_original": ratio(
            "real: original step 2x224", "real: exact step 2x224"
        ),
        "fast_standin_1x224_vs_original": ratio(
            "stand-in: original step 2x224", "stand-in: fast step 1x224"
        ),
        "fast_real_2x84_vs_whole_meshes": ratio(
            "real: fast step 2x84, whole meshes", "real: fast step 2x84"
        ),
        "stepping_exact_vs_original": ratio("stepping: original step", "stepping: exact step"),
        "stepping_fast_vs_original": ratio("stepping: original step", "stepping: fast step"),
        "stepping_exact_share_of_floor": ratio("stepping: floor step", "stepping: exact step"),
        "stepping_fast_share_of_floor": ratio("stepping: floor step", "stepping: fast step"),
        **{key: seconds[key] for key in seconds if key.startswith("picture_difference")},
        "reset_ms": seconds["reset_ms"],
        "worker_mb_placeholder": seconds["worker_mb_placeholder"],
        "worker_mb_real": seconds["worker_mb_real"],
    }


if __name__ == "__main__":
    main()
