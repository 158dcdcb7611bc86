"""When held-out episodes run beside training, with how many simulators, and when they end a run."""

from collections.abc import Mapping

from vla_rl.types import Config


class HeldOutSchedule(Config, frozen=True, kw_only=True):
    """Held-out episodes during a run, in a process of their own beside training."""

    every: int | None = None
    """Updates between two evaluations beside training, from a checkpoint that is saved for them, on
    starts that choose the best one. None: nothing is chosen; the held-out starts run before the
    first update and after the last."""

    simulators: int = 1
    """Simulators of the evaluations beside training. More finish sooner and take more cores from
    the simulators of training; the evaluation of the last weights has all simulators of the run."""

    niceness: int = 10
    """Priority of the evaluations beside training, from 0, that of training itself, to 19, the
    lowest. It matters only if the machine has no idle core."""

    first_results_of: str | None = None
    """Folder of a run whose results of its first weights are taken for this run's, instead of
    running those episodes again. Policy, starts and conditions must be the same. None: run them."""

    stop_after: int | None = None
    """Stop the run, in order, when the trend of the last evaluations on the starts that choose, this
    many and one, is certainly below 2 points an evaluation. With few starts, more evaluations are
    needed, which one line says. None: never."""

    def __post_init__(self) -> None:
        for field in ("every", "stop_after"):
            value = getattr(self, field)
            self.require(value is None or value >= 1, field, "at least 1, or none")
        self.require(self.simulators >= 1, "simulators", "at least 1")
        self.require(0 <= self.niceness <= 19, "niceness", "0 to 19")

    def unread(self) -> Mapping[str, str]:
        """Return the options of evaluations during the run, if there are none."""
        if self.every is not None:
            return {}
        choosing = (name for name in self.__struct_fields__ if name.startswith("choose_"))
        others = ("simulators", "niceness", "stop_after", *choosing)
        return dict.fromkeys(others, "held_out.every is none")
