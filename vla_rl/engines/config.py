"""Configuration of engines of every kind. Importing it imports neither torch nor vLLM."""

from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from vla_rl.types import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
)

UpdateMode: TypeAlias = Literal["drain", "keep", "restart"]
"""Handling of running requests when new weights arrive."""


WeightRoute: TypeAlias = Literal["auto", "host", "gpu"]
"""Memory through which new weights reach the engines."""


class VllmConfig(Config, frozen=True, kw_only=True):
    """Settings of the engine processes and of their weight updates."""

    num_engines: PositiveInt = 1
    """Number of engine processes, each with a copy of the weights. New requests go to the least
    loaded engine; later turns of a conversation go to the engine that holds its keys and values."""

    tensor_parallel_size: PositiveInt = 1
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

    num_threads: PositiveInt = 1
    """CPU threads per engine. More threads than idle cores slow the engine down, because they spin
    at barriers."""

    kv_cache_gib: PositiveInt = 1
    """Memory for keys and values per engine on a CPU, in GiB."""

    gpu_memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.4
    """Share of the GPU's memory that one engine takes, in (0, 1]; the learner needs the rest."""

    max_requests: PositiveInt = 64
    """Maximum number of requests that one engine computes together."""

    max_step_tokens: PositiveInt = 8192
    """Maximum number of tokens that one engine reads in one step; it always reads at least one
    whole prompt."""

    can_sleep: bool = False
    """Allow `sleep`, which frees an engine's GPU memory for a learner on the same GPU. CUDA builds
    of vLLM only."""

    attempts: PositiveInt = 3
    """Number of attempts for a request whose engine dies before the caller gets an error; 1 reports
    the first death."""

    max_restarts: NonNegativeInt = 5
    """Maximum number of restarts in a row of an engine that never answered. After that it is not
    restarted, and an error is logged; callers get the cause once no engine is left."""

    startup_s: PositiveFloat = 300.0
    """Seconds within which an engine's process has to start. All time limits of engines count only
    the time in which this process itself ran."""

    health_every_s: PositiveFloat = 10.0
    """Seconds without an answer after which an engine is checked with a request for one token. An
    engine that a signal stopped is found sooner."""

    health_timeout_s: PositiveFloat = 30.0
    """Seconds within which an engine has to answer that check; an engine that does not is killed
    and replaced."""

    update_timeout_s: PositiveFloat = 120.0
    """Seconds within which an engine has to take new weights; an engine that does not is killed and
    replaced."""

    drain_timeout_s: PositiveFloat = 600.0
    """Seconds within which running requests have to finish before new weights (`drain` only); an
    engine that needs longer is killed and replaced. Set it above the time of the longest reply."""

    verify_checksums: bool = False
    """Compare the CRC-32 of new weights as written with what every engine sees, before any engine
    applies them."""


ServerApi: TypeAlias = Literal["vllm", "sglang"]
"""The server's own interface: vLLM's completions and development routes, or SGLang's native one."""


class ModelServerConfig(Config, frozen=True, kw_only=True):
    """Settings of model servers that run elsewhere and of their weight updates."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers, such as http://10.0.0.7:8000. A new request goes to the least loaded
    one."""

    api: ServerApi = "vllm"
    """Interface of the servers. `vllm`: `vllm serve`, started with VLLM_SERVER_DEV_MODE=1 and
    --logprobs-mode processed_logprobs. `sglang`: SGLang's server and its /generate."""

    model: str | None = None
    """Name of the model at a vLLM server; none takes the first that it lists."""

    key_variable: str | None = None
    """Environment variable that holds the servers' API key; none sends no key."""

    weights_folder: str | None = None
    """Folder for new weights, which every server must reach under the same path. none: a temporary
    folder of this machine, which servers on other machines do not see."""

    update_mode: Literal["drain", "interrupt"] = "drain"
    """Handling of running requests when new weights arrive. `drain`: they finish with the old weights
    first. `interrupt` (SGLang only): they stop, and go on from their tokens so far with the new
    weights; each token keeps the version that it was sampled with."""

    attempts: PositiveInt = 3
    """Number of attempts for a request whose server is lost before the caller gets an error; 1
    reports the first loss."""

    request_timeout_s: PositiveFloat = 600.0
    """Seconds within which a server has to answer a request; one that does not counts as lost. Set it
    above the time of the longest reply."""

    update_timeout_s: PositiveFloat = 600.0
    """Seconds within which running requests have to end before an update, and again within which a
    server has to load new weights."""

    health_every_s: PositiveFloat = 5.0
    """Seconds between two checks of every server. A lost server that answers again gets the current
    weights before its first request."""

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            self.require(
                parts.scheme in ("http", "https") and bool(parts.hostname),
                "urls",
                "addresses such as http://10.0.0.7:8000",
            )
        self.require(len(set(self.urls)) == len(self.urls), "urls", "different addresses")
        self.require(
            self.update_mode == "drain" or self.api == "sglang",
            "update_mode",
            "'drain', because a vLLM server cannot interrupt requests and return their tokens",
        )


class EngineConfig(Config, frozen=True, kw_only=True):
    """Settings of the engine that makes the decisions, and of its batches."""

    # Named, so that a run says which options nothing will read, instead of training under settings
    # that its author believes in.
    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("vllm",), "kind", ("vllm",)),
        ReadIf(("server",), "kind", ("server",)),
        ReadIf(
            ("max_batch", "max_wait_s", "cuda_graphs", "kept_conversations"), "kind", ("torch",)
        ),
    )

    FORMER_NAMES = MappingProxyType({"remote": "server"})
    FORMER_VALUES = MappingProxyType({"kind": {"remote": "server"}})

    kind: Literal["torch", "vllm", "server"] = "torch"
    """Engine that runs the policy. `torch`: in this process, with the learner's weights. `vllm`: in
    separate vLLM processes, set up with `engine.vllm`. `server` (language policies): on vLLM or SGLang
    servers that run elsewhere, named in `engine.server`."""

    vllm: VllmConfig = VllmConfig()

    server: ModelServerConfig = ModelServerConfig()

    max_batch: PositiveInt = 16
    """Maximum number of decisions computed in one batch."""

    max_wait_s: NonNegativeFloat = 0.0
    """Seconds that an idle device waits for a fuller batch, counted from the oldest request; 0
    starts at once."""

    is_deterministic: bool = False
    """Compute every decision in a batch of one, so that results are the same to the last bit
    whatever else is waiting. Slower; use it to reproduce a run."""

    cuda_graphs: bool = True
    """Record an OpenVLA policy's computation of actions as a CUDA graph, once per batch size, and
    replay it (GPU only)."""

    max_context: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Language policies only: maximum tokens of a prompt and its reply together; none takes the
    model's own limit."""

    max_reply: PositiveInt = 512
    """Language policies only: maximum tokens of one reply."""

    max_images: PositiveInt = 64
    """Vision-language policies only: maximum images of a conversation, over all its turns."""

    kept_conversations: NonNegativeInt = 16
    """Language policies only: number of idle conversations whose keys and values are kept between
    their turns, so that the beginning they share with a new prompt is not computed again. 0 keeps
    none."""
