"""Settings for the hosts of a run."""

from collections.abc import Mapping

from vla_rl.cluster.ray_config import RayConfig
from vla_rl.types import Config


class ClusterConfig(Config, frozen=True, kw_only=True):
    """The hosts of a run, and what this one does."""

    hosts: str | None = None
    """File that lists hosts which run the episodes, each with simulators.num_envs simulators and an
    engine of its own. `vla-rl host` starts a host. None: episodes run on this host."""

    ray: RayConfig = RayConfig()
    """Hosts of a Ray cluster, instead of a list of hosts."""

    plays_here: bool = False
    """Also run episodes on this host, beside the learner."""

    depot_gib: float = 4.0
    """Memory on each host for observations, tokens and actions of finished episodes. They come here
    when their group is complete and not filtered; episodes without room there come here at once. 0: all
    episodes come at once."""

    alone_s: float = 300.0
    """Seconds without any host after which the run ends instead of waiting for one to come back."""

    resume_within_s: float = 120.0
    """Seconds for which hosts keep simulators, engine and finished episodes after they lost this
    process, so that a --resume takes them over. Another run on the same hosts ends them at once. 0: they
    end with this process."""

    def __post_init__(self) -> None:
        self.require(
            self.hosts is None or self.ray.address is None,
            "hosts",
            "none beside ray.address: hosts are listed, or found by Ray",
        )
        self.require(self.depot_gib >= 0, "depot_gib", "at least 0 GiB")
        self.require(self.alone_s > 0, "alone_s", "above 0 seconds")
        self.require(self.resume_within_s >= 0, "resume_within_s", "at least 0 seconds")

    @property
    def has_hosts(self) -> bool:
        """Whether other hosts run episodes."""
        return self.hosts is not None or self.ray.address is not None

    def unread(self) -> Mapping[str, str]:
        """Return the options that only matter with several hosts."""
        if self.has_hosts:
            return {}
        others = [name for name in self.__struct_fields__ if name not in ("hosts", "ray")]
        return dict.fromkeys(others, "cluster.hosts and cluster.ray.address are none")
