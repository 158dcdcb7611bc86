"""Where the endpoint listens."""

import ipaddress

from vla_rl.types import Config


class EndpointConfig(Config, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint in front of policies."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """0 takes a free one."""

    allow_remote: bool = False
    """Let `host` be an address that other machines reach. Requests are neither encrypted nor limited in rate: keep such an
    endpoint inside a network that you trust."""

    model: str = "policy"
    """The name that `/v1/models` gives, where there is one policy. Requests may ask for any name then."""

    max_request_kb: int = 8192
    """Size of one request, in KiB; larger ones are refused."""

    def __post_init__(self) -> None:
        self.require(0 <= self.port < 1 << 16, "port", "0 to 65535")
        self.require(self.max_request_kb >= 1, "max_request_kb", ">= 1")
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
