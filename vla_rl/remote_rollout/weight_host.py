"""A process on another host that gets weights."""

import asyncio
from dataclasses import dataclass, field

from vla_rl.remote_rollout.rollout_host import RolloutHost


@dataclass(frozen=True)
class WeightHost:
    """A process that gets weights."""

    actor: RolloutHost
    address: str
    """Address of its host, without a port, at which its neighbours and the ranks find it."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is lost, or has failed, so that its neighbours do not wait for it."""
