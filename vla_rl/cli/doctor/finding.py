"""The argument of a check, and its result."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from vla_rl.types import Config

SHARED_MEMORY: Final = Path("/dev/shm")

Severity: TypeAlias = Literal["error", "warning"]
"""error: something will fail or compute wrong results. warning: something is slower or missing."""


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong."""

    what: str
    why: str
    """The consequence, if nothing is done."""

    remedy: str
    severity: Severity = "error"

    def __str__(self) -> str:
        """Format as one line."""
        return f"{self.severity}: {self.what}. {self.why}. {self.remedy}."


class Patient(Config, frozen=True, kw_only=True):
    """The machine, and what is meant to run on it."""

    checkpoint: str | None = None
    """Folder or hub id of a policy to look at too. None: no policy."""

    norm_key: str | None = None
    """Name of the policy's action statistics. None: the policy's only set."""

    policy_family: Literal["auto", "openvla", "openvla_oft", "continuous"] = "auto"
    """Family to read the policy as. auto: the one that its files name."""

    load_gib: float = 1.0
    """Size in GiB up to which the policy is loaded and asked for actions. Larger ones are looked at
    by their files alone; raise it to load them, which takes longer than 20 s."""

    num_envs: int = 16
    """Simulators that will run at the same time."""

    root: str = "runs"
    """Parent folder of run directories."""

    keep_checkpoints: int = 2
    """Checkpoints that a run keeps."""

    checkpoint_bytes: int | None = None
    """Size of a checkpoint. None: computed from the policy's weight files, 7 times their size: AdamW's
    two moments and masters in float32 beside bfloat16 weights."""

    shared_memory: str = str(SHARED_MEMORY)
    """Folder in memory that NCCL, vLLM and PyTorch's data loaders share data in."""

    shared_mib: int = 1024
    """Room that is needed there: NCCL takes up to tens of MiB for each pair of GPUs, vLLM's workers
    hundreds. Containers have 64 MiB unless told otherwise. 0 for one learner process without
    vLLM."""

    seconds: float = 20.0
    """Time limit of all checks together."""

    def __post_init__(self) -> None:
        self.require(self.num_envs >= 1, "num_envs", "at least 1 simulator")
        self.require(self.keep_checkpoints >= 1, "keep_checkpoints", "at least 1")
        self.require(self.seconds > 0.0, "seconds", "above 0")


def not_finished(what: str, seconds: float) -> Finding:
    """Return the finding of a check that was not finished: nothing is known then."""
    return Finding(
        f"{what} was not finished within {seconds:.0f} s",
        "Whether it would go wrong is not known",
        "Close other programs, or allow more time with --seconds",
        "warning",
    )


Check: TypeAlias = Callable[[Patient], Iterable[Finding]]
