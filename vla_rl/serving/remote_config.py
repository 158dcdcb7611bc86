"""How a policy server elsewhere is asked; importing this needs no websockets."""

from typing import Final, Literal

from vla_rl.serving.observation_maps import read_map
from vla_rl.types import Config, PositiveFloat, PositiveInt

SCHEMES: Final = ("ws://", "wss://")


def is_server_address(checkpoint: str) -> bool:
    """Return whether this is the address of a policy server and not a folder or a hub id."""
    return checkpoint.startswith(SCHEMES)


class RemotePolicyConfig(Config, frozen=True, kw_only=True):
    """How a policy server is asked; read if the checkpoint is an address (ws://HOST:PORT)."""

    protocol: Literal["openpi", "vla-eval"] = "openpi"
    """openpi: one observation, one chunk. vla-eval: a predict server of the package vla-eval."""

    map: tuple[str, ...] = ("libero",)
    """Names of the entries that an openpi server reads: libero, or pairs such as
    observation/image=image (the server's name, then the environment's)."""

    replan: PositiveInt | None = None
    """Control steps of each chunk that are run before the server is asked again. None: all of them."""

    answer_timeout_s: PositiveFloat = 60.0
    """Seconds within which an answer has to come; the first of a server that compiles may take long."""

    connect_timeout_s: PositiveFloat = 60.0
    """Seconds within which a server that is being started again has to be there."""

    token_file: str | None = None
    """File with the token that is sent in the header `Authorization: Api-Key TOKEN`."""

    def __post_init__(self) -> None:
        targets = [target for _, target in read_map(self.map)]
        self.require(
            len(set(targets)) == len(targets),
            "map",
            "one entry for each of the environment's, which cannot be split",
        )
