"""Actors: classes whose public async methods are called alike wherever they run.

An actor runs in this loop, in a child process or on another host.

The names below are imported on first use, because each simulator process imports this package and
needs few of them.
"""

from typing import TYPE_CHECKING

from vla_rl.lazy_names import lazy_names

if TYPE_CHECKING:
    from vla_rl.actors.actor import Actor, actor_method
    from vla_rl.actors.call_limit import CallLimit
    from vla_rl.actors.fanout import begin, call_all, call_any, call_as_completed, tell
    from vla_rl.actors.fork_servers import LastingForkServers
    from vla_rl.actors.keys import make_keys, read_keys, read_public_key
    from vla_rl.actors.placement import (
        ChildProcess,
        ForkServer,
        InLoop,
        KeyPair,
        Placement,
        PrepareHook,
        RemoteHost,
        RestartPolicy,
        Takeover,
    )
    from vla_rl.actors.runtime import ActorInfo, Runtime
    from vla_rl.actors.slots import release
    from vla_rl.actors.waits import Wait, current_waits, note_progress, progress_counts, waiting
    from vla_rl.actors.watchdog import Watchdog
    from vla_rl.actors.wire import LagReport

__all__ = [
    "Actor",
    "ActorInfo",
    "CallLimit",
    "ChildProcess",
    "ForkServer",
    "InLoop",
    "KeyPair",
    "LagReport",
    "LastingForkServers",
    "Placement",
    "PrepareHook",
    "RemoteHost",
    "RestartPolicy",
    "Runtime",
    "Takeover",
    "Wait",
    "Watchdog",
    "actor_method",
    "begin",
    "call_all",
    "call_any",
    "call_as_completed",
    "current_waits",
    "make_keys",
    "note_progress",
    "progress_counts",
    "read_keys",
    "read_public_key",
    "release",
    "tell",
    "waiting",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "actor": ("Actor", "actor_method"),
        "call_limit": ("CallLimit",),
        "fanout": ("begin", "call_all", "call_any", "call_as_completed", "tell"),
        "fork_servers": ("LastingForkServers",),
        "keys": ("make_keys", "read_keys", "read_public_key"),
        "placement": (
            "ChildProcess",
            "ForkServer",
            "InLoop",
            "KeyPair",
            "Placement",
            "PrepareHook",
            "RemoteHost",
            "RestartPolicy",
            "Takeover",
        ),
        "runtime": ("ActorInfo", "Runtime"),
        "slots": ("release",),
        "waits": ("Wait", "current_waits", "note_progress", "progress_counts", "waiting"),
        "watchdog": ("Watchdog",),
        "wire": ("LagReport",),
    },
)
