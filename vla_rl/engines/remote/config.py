"""Configuration of remote engines. Importing it does not import torch."""

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from vla_rl.types import Config

RemoteApi: TypeAlias = Literal["vllm", "sglang"]
"""The server's own interface: vLLM's completions and development routes, or SGLang's native one."""


class RemoteConfig(Config, frozen=True, kw_only=True):
    """Settings of model servers that run elsewhere and of their weight updates."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers, such as http://10.0.0.7:8000. A new request goes to the least loaded
    one."""

    api: RemoteApi = "vllm"
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

    attempts: int = 3
    """Number of attempts for a request whose server is lost before the caller gets an error; 1
    reports the first loss."""

    request_timeout_s: float = 600.0
    """Seconds within which a server has to answer a request; one that does not counts as lost. Set it
    above the time of the longest reply."""

    update_timeout_s: float = 600.0
    """Seconds within which running requests have to end before an update, and again within which a
    server has to load new weights."""

    health_every_s: float = 5.0
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
        self.require(self.attempts >= 1, "attempts", "at least 1")
        for field in ("request_timeout_s", "update_timeout_s", "health_every_s"):
            self.require(getattr(self, field) > 0.0, field, "above 0 seconds")
