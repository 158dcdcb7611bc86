"""Address and limits of the endpoint."""

import ipaddress

from vla_rl.types import Config


class EndpointConfig(Config, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint in front of policies."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port to listen on; 0: any free port."""

    allow_remote: bool = False
    """Allow a `host` that other machines can reach. Requests are neither encrypted nor limited in
    rate: use it only in a network that you trust."""

    model: str = "policy"
    """Name that `/v1/models` lists if there is one policy. Requests may name any model."""

    max_request_kb: int = 8192
    """Largest request body, in KiB; larger ones are rejected with status 413."""

    max_connections: int = 512
    """Most open connections; further clients wait until one closes. Lowered, with a warning, to
    half of the process's free file descriptors, so that the rest of the runtime keeps the other
    half."""

    idle_timeout_s: float = 30.0
    """Most seconds until a connection has sent the headers of its next request; then it is
    closed."""

    body_timeout_s: float = 30.0
    """Most seconds until a request's body has arrived; then it is rejected with status 408."""

    def __post_init__(self) -> None:
        self.require(0 <= self.port < 1 << 16, "port", "0 to 65535")
        self.require(self.max_request_kb >= 1, "max_request_kb", ">= 1")
        self.require(self.max_connections >= 1, "max_connections", ">= 1")
        self.require(self.idle_timeout_s > 0, "idle_timeout_s", "> 0 seconds")
        self.require(self.body_timeout_s > 0, "body_timeout_s", "> 0 seconds")
        self.require(bool(self.model), "model", "a name")
        self.require(
            self.allow_remote or _is_local(self.host),
            "host",
            "an address of this machine alone, unless allow_remote is set",
        )


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
