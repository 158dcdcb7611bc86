"""Compare two ways of running the same episode, value by value, until the first that differs.

    run  ─► recording.py ─┐
                          ├─► trace (JSON lines) ─┬─► comparison.py ─► first difference, with a hint
    somebody's own loop ──┘                       │
                                       another trace

`boundaries.py` lists what is compared, in the order in which an episode produces it. The
page parity.md shows how to write a trace from a loop of your own.
"""

from vla_rl.evaluation.parity.comparison import Comparison, Difference, compare
from vla_rl.evaluation.parity.trace import (
    BOUNDARIES,
    Boundary,
    Trace,
    TraceEntry,
    read_trace,
    write_trace,
)

__all__ = [
    "BOUNDARIES",
    "Boundary",
    "Comparison",
    "Difference",
    "Trace",
    "TraceEntry",
    "compare",
    "read_trace",
    "write_trace",
]
