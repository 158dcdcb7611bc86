"""Actors: classes whose public async methods are called alike wherever they run.

An actor runs in this loop, in a child process or on another host.

The names below are imported on first use, because each simulator process imports this package and
needs few of them.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.actors.calls.actor import Actor as Actor, actor_method as actor_method
    from vla_rl.actors.calls.handles import (
        begin_call as begin_call,
        call_all as call_all,
        call_any as call_any,
        call_as_completed as call_as_completed,
        tell as tell,
    )
    from vla_rl.actors.calls.pending import CallLimit as CallLimit
    from vla_rl.actors.keys import (
        make_keys as make_keys,
        read_keys as read_keys,
        read_public_key as read_public_key,
    )
    from vla_rl.actors.placement import (
        ChildProcess as ChildProcess,
        ForkServer as ForkServer,
        InLoop as InLoop,
        KeyPair as KeyPair,
        Placement as Placement,
        PrepareHook as PrepareHook,
        RemoteHost as RemoteHost,
        RestartPolicy as RestartPolicy,
        Takeover as Takeover,
    )
    from vla_rl.actors.processes.fork_servers import LastingForkServers as LastingForkServers
    from vla_rl.actors.remote.shared_handles import close_handle as close_handle
    from vla_rl.actors.runtime import ActorInfo as ActorInfo, Runtime as Runtime
    from vla_rl.actors.wire.extensions import register_extension as register_extension
    from vla_rl.actors.wire.slots import release as release
    from vla_rl.util.stalls import (
        LagReport as LagReport,
        Wait as Wait,
        Watchdog as Watchdog,
        count_progress as count_progress,
        list_waits as list_waits,
        note_progress as note_progress,
        waiting as waiting,
    )


__getattr__, __dir__ = lazy_names(__name__)
