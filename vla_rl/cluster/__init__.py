"""The hosts of a run: what each has, how it is reached, and which ones come and go."""

from vla_rl.cluster.hosts import Gpu, Host, HostChange, HostResources, Hosts, Joined, Left, ThisHost

__all__ = ["Gpu", "Host", "HostChange", "HostResources", "Hosts", "Joined", "Left", "ThisHost"]
