"""Configuration of vLLM engines. Importing it does not import torch or vLLM."""

from typing import Literal, TypeAlias

from vla_rl.types import Config

UpdateMode: TypeAlias = Literal["drain", "keep", "restart"]
"""Handling of running requests when new weights arrive."""


WeightRoute: TypeAlias = Literal["auto", "host", "gpu"]
"""Memory through which new weights reach the engines."""


class VllmConfig(Config, frozen=True, kw_only=True):
    """Settings of the engine processes and of their weight updates."""

    num_engines: int = 1
    """Number of engine processes, each with a copy of the weights. New requests go to the least
    loaded engine; later turns of a conversation go to the engine that holds its keys and values."""

    tensor_parallel_size: int = 1
    """Number of GPUs that share each layer of one engine, for language policies that one GPU does not
    hold. It must divide the attention heads and the heads of keys and values."""

    update_mode: UpdateMode | None = None
    """Handling of running requests when new weights arrive. `drain`: they finish with the old
    weights first. `keep`: they pause, their prompts and tokens are read again with the new weights,
    and they go on. `restart`: they start again from their prompts. All tokens of an action chunk
    always come from one version: with `keep`, a chunk during which the weights changed is requested
    again. none: `drain` for action chunks, `keep` for replies."""

    weights_through: WeightRoute = "auto"
    """Memory through which new weights reach the engines. `host`: main memory. `gpu`: the GPU that
    learner and engines share, where it takes room for two copies (CUDA IPC). `auto`: `gpu` if the
    learner is on a GPU and vLLM is built for CUDA."""

    num_threads: int = 1
    """CPU threads per engine. More threads than idle cores slow the engine down, because they spin
    at barriers."""

    kv_cache_gib: int = 1
    """Memory for keys and values per engine on a CPU, in GiB."""

    gpu_memory_share: float = 0.4
    """Share of the GPU's memory that one engine takes, in (0, 1]; the learner needs the rest."""

    max_requests: int = 64
    """Maximum number of requests that one engine computes together."""

    max_step_tokens: int = 8192
    """Maximum number of tokens that one engine reads in one step; it always reads at least one
    whole prompt."""

    can_sleep: bool = False
    """Allow `sleep`, which frees an engine's GPU memory for a learner on the same GPU. CUDA builds
    of vLLM only."""

    attempts: int = 3
    """Number of attempts for a request whose engine dies before the caller gets an error; 1 reports
    the first death."""

    max_restarts: int = 5
    """Maximum number of restarts in a row of an engine that never answered. After that it is not
    restarted, and an error is logged; callers get the cause once no engine is left."""

    startup_s: float = 300.0
    """Seconds within which an engine's process has to start. All time limits of engines count only
    the time in which this process itself ran."""

    health_every_s: float = 10.0
    """Seconds without an answer after which an engine is checked with a request for one token. An
    engine that a signal stopped is found sooner."""

    health_timeout_s: float = 30.0
    """Seconds within which an engine has to answer that check; an engine that does not is killed
    and replaced."""

    update_timeout_s: float = 120.0
    """Seconds within which an engine has to take new weights; an engine that does not is killed and
    replaced."""

    drain_timeout_s: float = 600.0
    """Seconds within which running requests have to finish before new weights (`drain` only); an
    engine that needs longer is killed and replaced. Set it above the time of the longest reply."""

    verify_checksums: bool = False
    """Compare the CRC-32 of new weights as written with what every engine sees, before any engine
    applies them."""

    def __post_init__(self) -> None:
        for field in (
            "num_engines",
            "tensor_parallel_size",
            "num_threads",
            "kv_cache_gib",
            "max_requests",
            "max_step_tokens",
            "attempts",
        ):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.max_restarts >= 0, "max_restarts", "at least 0")
        self.require(
            0.0 < self.gpu_memory_share <= 1.0, "gpu_memory_share", "a share above 0 and at most 1"
        )
        for field in (
            "startup_s",
            "health_every_s",
            "health_timeout_s",
            "update_timeout_s",
            "drain_timeout_s",
        ):
            self.require(getattr(self, field) > 0.0, field, "above 0 seconds")
