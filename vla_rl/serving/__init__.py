"""Policies behind openpi's websocket protocol: `vla-rl serve` as a library.

PolicyServer        serves an engine's decisions to any number of clients
CheckpointWatcher   gives the engine newer weights between two replies
ObservationReader   turns what a client calls its entries into the policy's observation
"""

from typing import TYPE_CHECKING

from vla_rl.serving.observation_maps import Entry, ObservationReader, read_map
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.serving.checkpoint_watcher import CheckpointWatcher as CheckpointWatcher
    from vla_rl.serving.policy_server import (
        PolicyServer as PolicyServer,
        ServerConfig as ServerConfig,
    )

__all__ = [
    "CheckpointWatcher",
    "Entry",
    "ObservationReader",
    "PolicyServer",
    "ServerConfig",
    "read_map",
]

__getattr__, __dir__ = lazy_names(__name__)
