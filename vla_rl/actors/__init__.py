"""Actors: classes whose public async methods are called the same way in this loop, a child process
or on another host.
"""

from vla_rl.actors.actor import Actor, endpoint
from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.fanout import begin, call_all, call_any, call_as_completed, tell
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
    "Placement",
    "PrepareHook",
    "RemoteHost",
    "RestartPolicy",
    "Runtime",
    "Wait",
    "Watchdog",
    "begin",
    "call_all",
    "call_any",
    "call_as_completed",
    "current_waits",
    "endpoint",
    "make_keys",
    "note_progress",
    "progress_counts",
    "read_keys",
    "read_public_key",
    "release",
    "tell",
    "waiting",
]
