"""Settings for the hosts of a run."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec

from vla_rl.actors.placement import HIGHEST_PORT
from vla_rl.cluster.layout import parse_gpu_range
from vla_rl.types import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
)


class RayConfig(Config, frozen=True, kw_only=True):
    """Settings for the hosts of a Ray cluster: which cluster, and how much of it."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf((), "address"),)

    FORMER_NAMES = MappingProxyType({"place_within_s": "reserve_within_s"})

    address: str | None = None
    """Address of the cluster's head, such as `10.0.0.1:6379`; `auto` for the one that runs on this
    machine; `local` starts one on this machine alone, which ends with the run. None: no Ray."""

    num_hosts: PositiveInt = 1
    """Nodes to take, besides this process's own host."""

    cores_per_host: PositiveInt = 1
    """Cores that are reserved on each."""

    gpus_per_host: NonNegativeInt = 0
    """GPUs that are reserved on each, all of the node's or none: which of several a run has is not
    known before it starts."""

    interface: str | None = None
    """Network interface of learner ranks, here and on the nodes, such as `eth1`. None: that of the
    address by which Ray knows a node."""

    allow_open_cluster: bool = False
    """Also use a cluster without authentication. Anyone who reaches such a cluster can run programs on
    all of its machines, and in this run."""

    reserve_within_s: PositiveFloat = 60.0
    """Seconds in which a node must give what is reserved, and start our host there."""

    look_every_s: PositiveFloat | None = 5.0
    """Seconds between two looks for new nodes, which join the run; none: the first nodes only."""

    def __post_init__(self) -> None:
        self.require(self.address != "", "address", "an address, 'auto', 'local' or none")


class ClusterConfig(Config, frozen=True, kw_only=True):
    """The hosts of a run, and what this one does."""

    FORMER_NAMES = MappingProxyType(
        {"depot_gib": "episode_store_gib", "plays_here": "local_rollout"}
    )

    hosts: str | None = None
    """File that lists hosts which run the episodes, each with simulators.num_envs simulators and an
    engine of its own. `vla-rl host` starts a host. None: episodes run on this host."""

    ray: RayConfig = RayConfig()
    """Hosts of a Ray cluster, instead of a list of hosts."""

    learners: tuple[str, ...] = ()
    """Hosts whose GPUs, or CPUs, share the update as learner ranks instead of running episodes: `here`
    for this one, names from the list of hosts, or addresses of Ray's nodes, such as `here:0-3
    gpu[2-4]:0-7` or `10.0.0.[2-5]:0-7`. One rank for each GPU, in this order; ranks on CPUs are dealt
    evenly. Empty: all ranks are on this host."""

    allow_unencrypted_ranks: bool = False
    """With learners on several hosts: let gloo or NCCL carry their gradients and weights between the
    hosts, without encryption and without a key. Set it if only machines that you trust reach that
    network."""

    ranks_port: Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_PORT)] = 0
    """With learners on several hosts: port at which the host of rank 0 waits for the others. Later
    connections between ranks take any free ports. 0: any free port."""

    local_rollout: bool = False
    """Also run episodes on this host, beside the learner."""

    episode_store_gib: NonNegativeFloat = 4.0
    """Memory on each host for observations, tokens and actions of finished episodes. They are fetched
    when their group is complete and not filtered; episodes without room there come here at once. With
    learner.ranks above 1, also memory on each host with ranks for the images of groups that wait for
    their update; images without room come here. 0: all episodes come here at once."""

    alone_s: PositiveFloat = 300.0
    """Seconds without any host after which the run ends instead of waiting for one to come back."""

    resume_within_s: NonNegativeFloat = 120.0
    """Seconds for which hosts keep simulators, engine and finished episodes after they lost this
    process, so that a --resume takes them over. Another run on the same hosts ends them at once. 0: they
    end with this process."""

    def __post_init__(self) -> None:
        self.require(
            self.hosts is None or self.ray.address is None,
            "hosts",
            "none beside ray.address: hosts are listed, or found by Ray",
        )
        self.require(
            not self.learners or self.has_hosts,
            "learners",
            "none without other hosts (cluster.hosts or cluster.ray.address)",
        )
        hosts = [part.host for word in self.learners for part in parse_gpu_range(word)]
        self.require(
            self.allow_unencrypted_ranks or len(set(hosts)) < 2,
            "allow_unencrypted_ranks",
            f"True with ranks on {', '.join(hosts)}: gloo and NCCL neither encrypt gradients nor ask for "
            "a key, so set it if only machines that you trust reach the hosts' network, or let one host "
            "learn",
        )

    @property
    def has_hosts(self) -> bool:
        """Whether other hosts run episodes."""
        return self.hosts is not None or self.ray.address is not None

    def unused_options(self) -> Mapping[str, str]:
        """Return the options that only matter with several hosts."""
        of_learners = ("allow_unencrypted_ranks", "ranks_port")
        if self.has_hosts:
            return {} if self.learners else dict.fromkeys(of_learners, "cluster.learners is empty")
        kept = ("hosts", "ray", "learners")
        others = [name for name in self.__struct_fields__ if name not in kept]
        return dict.fromkeys(others, "cluster.hosts and cluster.ray.address are none")
