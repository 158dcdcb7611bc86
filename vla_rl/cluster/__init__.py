"""The hosts of a run, which of them come and go, and who does what on which of them."""

from vla_rl.cluster.hosts import Gpu, Host, HostChange, HostResources, Hosts, Joined, Left, ThisHost
from vla_rl.cluster.layout import (
    EnginePlace,
    Layout,
    RankPlace,
    SimulatorsPlace,
    layout_of,
    layout_with,
)
from vla_rl.cluster.layout_config import LayoutConfig, Needs
from vla_rl.cluster.layout_table import layout_table

__all__ = [
    "EnginePlace",
    "Gpu",
    "Host",
    "HostChange",
    "HostResources",
    "Hosts",
    "Joined",
    "Layout",
    "LayoutConfig",
    "Left",
    "Needs",
    "RankPlace",
    "SimulatorsPlace",
    "ThisHost",
    "layout_of",
    "layout_table",
    "layout_with",
]
