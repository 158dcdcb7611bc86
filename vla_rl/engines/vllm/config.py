"""The configuration of vLLM engines; it imports in an instant, without torch or vLLM."""

from typing import Literal, TypeAlias

from vla_rl.types import Config

UpdateMode: TypeAlias = Literal["drain", "keep", "restart"]
"""What becomes of requests that run when new weights come."""


WeightRoute: TypeAlias = Literal["auto", "host", "gpu"]
"""Whose memory new weights go through."""


class VllmConfig(Config, frozen=True, kw_only=True):
    """Engine processes, and how they take new weights."""

    num_engines: int = 1
    """Engine processes, each with a copy of the weights; requests go to the least loaded, conversations stay."""

    update_mode: UpdateMode | None = None
    """`drain`: running requests end with the old weights first; `keep`: they stop, what they computed is computed again with
    the new weights, and they go on; `restart`: they begin again from their prompts. An action chunk is always of one
    version: in `keep`, one that an update ran through is asked again. None: `drain` for chunks, `keep` for replies."""

    weights_through: WeightRoute = "auto"
    """Memory that new weights go through: `host`; or `gpu`, that of the GPU that learner and engines share, where two copies
    of them stay (CUDA IPC). auto: `gpu` where the learner is on one and vLLM is built for CUDA."""

    num_threads: int = 1
    """Threads that one engine computes with on a CPU; more than there are idle cores spin at barriers."""

    kv_cache_gib: int = 1
    """Memory of one engine for keys and values on a CPU, in GiB."""

    gpu_memory_share: float = 0.4
    """Share of a GPU's memory that one engine takes; the learner needs the rest."""

    max_requests: int = 64
    """Most requests that one engine computes together."""

    max_step_tokens: int = 8192
    """Most tokens that one engine reads in one step; at least one whole prompt is read."""

    can_sleep: bool = False
    """Let `sleep` free an engine's memory for a learner on the same GPU; only CUDA builds can."""

    attempts: int = 3
    """How often a request is asked before its caller is told that engines die; 1 tells it at once."""

    max_restarts: int = 5
    """Times in a row that an engine is started again without having answered once. Then its place stays empty, which is
    logged as an error; callers are told the cause once no engine is left."""

    startup_s: float = 300.0
    """Seconds for an engine's process to start. Like all limits of engines, it counts the time in which this process ran."""

    health_every_s: float = 10.0
    """Seconds without an answer after which an engine is asked for a token. One that a signal stopped is found sooner."""

    health_timeout_s: float = 30.0
    """Time for that token; an engine that does not give it is killed and replaced."""

    update_timeout_s: float = 120.0
    """Time for an engine to take new weights; one that does not is killed and replaced."""

    drain_timeout_s: float = 600.0
    """Time, in the mode `drain`, for what runs to end before new weights come; an engine that needs longer is killed and
    replaced. Above what the longest reply takes."""

    verify_checksums: bool = False
    """Compare what every engine sees of new weights with what was written, by CRC-32, before any of them applies them."""

    def __post_init__(self) -> None:
        for field in ("num_engines", "num_threads", "kv_cache_gib", "max_requests", "max_step_tokens", "attempts"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.max_restarts >= 0, "max_restarts", "at least 0")
        self.require(0.0 < self.gpu_memory_share <= 1.0, "gpu_memory_share", "a share above 0 and at most 1")
        for field in ("startup_s", "health_every_s", "health_timeout_s", "update_timeout_s", "drain_timeout_s"):
            self.require(getattr(self, field) > 0.0, field, "above 0 seconds")
