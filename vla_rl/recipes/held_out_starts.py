"""Settings of the held-out starts of a benchmark's tasks."""

from typing import ClassVar

from vla_rl.evaluation.held_out_schedule import HeldOutDecoding
from vla_rl.evaluation.scenes import StepLimit
from vla_rl.types import ReadIf


class HeldOutStarts(HeldOutDecoding, frozen=True, kw_only=True):
    """Greedy episodes before the first update and after the last, and beside training every few
    updates if wanted, from starts that are never trained on.
    """

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf((), "init_states"),
        ReadIf(("choose_init_states",), "every"),
    )

    init_states: str | None = "40-49,1000-1009"
    """Starts of each task that are reported: its fixed ones, such as 40-49, or drawn ones, such as
    1000-1009. None: no held-out episodes."""

    choose_init_states: str | None = None
    """Starts of each task that choose the best checkpoint, with `every`; none of them is reported or
    trained on. None: as many as are reported, the next numbers."""

    step_limit: StepLimit | None = None
    """None: each suite's published limit."""
