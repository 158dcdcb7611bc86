"""Settings of the layout: which GPUs learn, which act, and what they need."""

from typing import Literal

import msgspec

from vla_rl.cluster.gpu_ranges import GpuRange, parse_gpu_range
from vla_rl.errors import ConfigError
from vla_rl.types import Config


class LayoutConfig(Config, frozen=True, kw_only=True):
    """Settings that decide which host and GPU does what in a run."""

    mode: Literal["together", "apart", "both"] = "together"
    """`together`: every GPU acts and learns, by turns. `apart`: the GPUs of `learners` learn and all
    others act, so neither waits for the other. `both`: as `apart`, and the learners also act while
    they wait for episodes."""

    learners: tuple[str, ...] = ()
    """GPUs that learn, for the modes `apart` and `both`: `node1` for all GPUs of a host, `node1:0-5`
    for some, `node[1-4]:0-5` for those of several hosts."""

    num_learner_hosts: int | None = None
    """Number of hosts that learn with all of their GPUs, instead of `learners`: the first ones that
    have GPUs."""

    gpus_per_engine: int = 1
    """GPUs of one engine, all on one host (vLLM's tensor parallelism); >= 1."""

    def __post_init__(self) -> None:
        self.require(self.gpus_per_engine >= 1, "gpus_per_engine", ">= 1 GPU")
        self.require(
            self.num_learner_hosts is None or self.num_learner_hosts >= 1,
            "num_learner_hosts",
            ">= 1 host, or none to name the GPUs in `learners`",
        )
        named = int(bool(self.learners)) + int(self.num_learner_hosts is not None)
        if self.mode == "together" and named:
            raise ConfigError(
                "LayoutConfig.mode is 'together', in which every GPU learns; expected neither "
                "`learners` nor `num_learner_hosts`, or the mode 'apart' or 'both'"
            )
        if self.mode != "together" and named != 1:
            raise ConfigError(
                f"LayoutConfig.mode is {self.mode!r}, expected exactly one of `learners` and "
                f"`num_learner_hosts`, got {'both' if named else 'neither'}"
            )
        self.learner_ranges()

    def learner_ranges(self) -> tuple[GpuRange, ...]:
        """Return what `learners` names. Raises: ConfigError if an entry has another form."""
        return tuple(part for word in self.learners for part in parse_gpu_range(word))


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the parts of a run need; 0 is not checked.

    Estimates come from the caller: this room knows no policy.
    """

    learning_bytes: int = 0
    """GPU memory of a learner rank alone."""

    acting_bytes: int = 0
    """GPU memory of an engine on each of its GPUs."""

    both_bytes: int = 0
    """GPU memory of a rank and an engine on one GPU; less than their sum if they share weights."""

    simulator_bytes: int = 0
    """Host memory of one simulator."""

    rank_host_bytes: int = 0
    """Host memory of a learner rank."""
