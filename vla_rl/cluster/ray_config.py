"""Settings for hosts that Ray finds."""

from collections.abc import Mapping

from vla_rl.types import Config


class RayConfig(Config, frozen=True, kw_only=True):
    """Settings for the hosts of a Ray cluster: which cluster, and how much of it."""

    address: str | None = None
    """Address of the cluster's head, such as `10.0.0.1:6379`; `auto` for the one that runs on this
    machine; `local` starts one on this machine alone, which ends with the run. None: no Ray."""

    num_hosts: int = 1
    """Nodes to take, besides this process's own host; >= 1."""

    cores_per_host: int = 1
    """Cores that are reserved on each; >= 1."""

    gpus_per_host: int = 0
    """GPUs that are reserved on each, all of the node's or none: which of several a run has is not
    known before it starts."""

    interface: str | None = None
    """Network interface of learner ranks, here and on the nodes, such as `eth1`. None: that of the
    address by which Ray knows a node."""

    allow_open_cluster: bool = False
    """Also use a cluster without authentication. Anyone who reaches such a cluster can run programs on
    all of its machines, and in this run."""

    place_within_s: float = 60.0
    """Seconds in which a node must give what is reserved, and start our host there; > 0."""

    look_every_s: float | None = 5.0
    """Seconds between two looks for new nodes, which join the run; none: the first nodes only."""

    def __post_init__(self) -> None:
        self.require(self.address != "", "address", "an address, 'auto', 'local' or none")
        self.require(self.num_hosts >= 1, "num_hosts", ">= 1 host")
        self.require(self.cores_per_host >= 1, "cores_per_host", ">= 1 core")
        self.require(self.gpus_per_host >= 0, "gpus_per_host", ">= 0 GPUs")
        self.require(self.place_within_s > 0, "place_within_s", "> 0 s")
        self.require(
            self.look_every_s is None or self.look_every_s > 0, "look_every_s", "> 0 s or none"
        )

    def unread(self) -> Mapping[str, str]:
        """Return the options that only matter with an address."""
        others = [name for name in self.__struct_fields__ if name != "address"]
        return {} if self.address is not None else dict.fromkeys(others, "address is none")
