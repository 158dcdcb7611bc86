"""The hosts of a run, with the layout of its parts on them."""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.cluster.hosts import (
        Gpu as Gpu,
        Host as Host,
        HostChange as HostChange,
        HostResources as HostResources,
        Hosts as Hosts,
        Joined as Joined,
        Left as Left,
        ThisHost as ThisHost,
    )
    from vla_rl.cluster.layout import (
        EngineDevices as EngineDevices,
        HostSimulators as HostSimulators,
        Layout as Layout,
        Needs as Needs,
        RankDevice as RankDevice,
        format_layout as format_layout,
    )

__getattr__, __dir__ = lazy_names(__name__)
