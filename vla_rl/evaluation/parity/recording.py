"""Recording of an episode of ours, from the simulator's image to the executed action.

What the simulator gives and gets is recorded for every family of policies; what a policy computes in between, for
families that tell it (`trace_decision`, as OpenVLA's do).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vla_rl.evaluation.parity.trace import BOUNDARIES, Trace, TraceEntry
from vla_rl.types import Step, Trajectory

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy, TracedValue

_ORDER: Final = {boundary.name: number for number, boundary in enumerate(BOUNDARIES)}


def record_trace(trajectory: Trajectory, policy: "RobotPolicy", source: str) -> Trace:
    """Return the values of an episode.

    Images and prompts are prepared again, by the code that acted: the preparation is
    deterministic.

    Args:
        trajectory: the episode, with whole observations.
        policy: the policy that acted in it.
        source: description of the loop, for tables.
    """
    entries: list[TraceEntry] = []
    for decision, step in enumerate(trajectory.steps):
        entries += sorted(_entries(decision, step, policy), key=lambda each: _ORDER[each.boundary])
    last = len(trajectory.steps) - 1
    success = bool(trajectory.stop_reason.is_success)
    return Trace(source, (*entries, TraceEntry(last, "success", success)))


def _entries(decision: int, step: Step, policy: "RobotPolicy") -> Iterator[TraceEntry]:
    seen, tokens = step.observation, step.chunk.tokens
    yield TraceEntry(decision, "instruction", seen["instruction"])
    # a flow policy may have cameras that the robot lacks
    for camera in (name for name in policy.config.cameras if name in seen):
        # the environment turns OpenGL's image by 180 degrees, which takes nothing away
        yield TraceEntry(decision, "camera", np.ascontiguousarray(seen[camera][::-1, ::-1]), camera)
        yield TraceEntry(decision, "orientation", seen[camera], camera)
    if policy.config.state_size is not None:
        yield TraceEntry(decision, "state", np.asarray(seen["state"]))
    trace: Callable[[Any, np.ndarray], Iterable[TracedValue]] | None
    trace = getattr(policy, "trace_decision", None)
    for traced in () if trace is None else trace(seen, tokens):
        yield TraceEntry(decision, traced.boundary, traced.value, traced.camera)
    yield TraceEntry(decision, "tokens", tokens)
    yield TraceEntry(decision, "executed_action", step.chunk.actions[: len(step.rewards)])
