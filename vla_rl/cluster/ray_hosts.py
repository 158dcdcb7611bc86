"""The hosts of a Ray cluster: Ray says who is there and reserves it, and does nothing else.

    Ray   which nodes exist ─► a placement group holds cores and GPUs ─► an actor starts our server
    we    a monitor on each host ─► its death is the host's ─► Left

All data goes over our own encrypted wire. Ray is not asked about deaths: it noticed a pulled cable
after 65 s, our monitor after 2.4 s. This is the only module that imports ray, while it joins.

Ray ends this whole process if anything touches it after its shutdown. So every call to it is awaited to
its end, also by a task that is cancelled, and no handle of Ray outlives the block.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Collection
from types import TracebackType
from typing import Any, Final, Self

import zmq

from vla_rl.actors import KeyPair, Runtime
from vla_rl.actors.placement import LOST_AFTER_S
from vla_rl.cluster.config import RayConfig
from vla_rl.cluster.hosts import (
    Host,
    HostChange,
    HostMonitor,
    Joined,
    Left,
    get_own_resources,
    make_own_report,
    require_same_versions,
)
from vla_rl.cluster.ray_cluster import RayCluster, RayNode, ReservedNode, name_node
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.util.stalls import waiting
from vla_rl.util.tasks import run_in_thread

logger = logging.getLogger(__name__)

OLDEST_RAY: Final = (2, 52)
"""First version with token authentication."""

MOST_CHANGES: Final = 256
"""Changes that wait to be read; then the keepers of hosts wait."""

REPORT_WITHIN_S: Final = 60.0
"""Longest time in which a host reports its versions, the import of torch there included."""


class RayHosts:
    """Hosts of a Ray cluster, which this process joins while the block is open.

    Args:
        config: which cluster, and how much of it.
        wanted: names of hosts that are taken before all others.
        may_be_away: whether fewer than `num_hosts` will do, as after a restart of the run; the others
            are looked for.
        lost_after_s: silence after which a host is lost (s).
    """

    def __init__(
        self,
        config: RayConfig,
        *,
        wanted: Collection[str] = (),
        may_be_away: bool = False,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        config.require(config.address is not None, "address", "an address, 'auto' or 'local'")
        self._config, self._lost_after_s = config, lost_after_s
        self._wanted, self._may_be_away = wanted, may_be_away
        self._local = Host(name="this host", resources=get_own_resources())
        self._reserved: dict[str, ReservedNode] = {}
        self._runtime = Runtime("hosts of Ray")
        self._changes: asyncio.Queue[HostChange | None] = asyncio.Queue(MOST_CHANGES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._ray: Any = None

    async def __aenter__(self) -> Self:
        """Join the cluster and start a host on `num_hosts` nodes.

        Raises: ConfigError without Ray, with an old one, for a cluster without authentication or
            without the resources.
        """
        public, secret = zmq.curve_keypair()
        keys = KeyPair(public=public.decode(), secret=secret.decode())
        await self._runtime.__aenter__()
        try:
            self._ray = await run_in_thread(_join_cluster, self._config)
            self._cluster = RayCluster(self._ray, self._config, keys, self._lost_after_s)
            if not self._config.allow_open_cluster:
                await run_in_thread(self._cluster.require_authentication)
            await self._reserve_first(await run_in_thread(self._nodes_to_reserve))
        except BaseException as error:
            await self._leave(type(error), error, error.__traceback__)
            raise
        if self._config.look_every_s is not None:
            self._own(self._look(self._config.look_every_s), "look for nodes of Ray")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End our server on each node, give back what is reserved, and leave the cluster."""
        await self._leave(kind, error, traceback)

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are there now, this process's own first."""
        return (self._local, *(reserved.host for reserved in self._reserved.values()))

    async def changes(self) -> AsyncIterator[HostChange]:
        """Yield each host that joins or leaves after the block was entered; for one reader.

        Raises: what ended the look for nodes or the care for a host, such as a cluster that is gone.
        """
        # waits for                          woken by
        # a change, here                     `_watch_host` (Left), `_look` (Joined), `_end_changes`
        # room in `_changes`, at `put`       the reader of this iteration
        # `wait_until_gone`                  the end of the monitor, its host or the connection
        while (change := await self._changes.get()) is not None:
            yield change
        if self._failure is not None:
            raise self._failure

    def _nodes_to_reserve(self) -> list[RayNode]:
        """Return the fitting nodes, those that are wanted first. Raises: ConfigError for too few."""
        cluster, nodes = self._cluster, self._cluster.list_nodes()
        fitting = cluster.list_fitting_nodes() if self._may_be_away else cluster.require_resources()
        # Those of the last run first: they have its images, and perhaps processes that wait for it.
        return sorted(fitting, key=lambda node: name_node(node, nodes) not in self._wanted)

    async def _reserve_first(self, nodes: list[RayNode]) -> None:
        """Take nodes until there are enough. Raises: ConfigError of the last one that is held."""
        refusal: ConfigError | None = None
        for node in nodes:
            if len(self._reserved) == self._config.num_hosts:
                return
            try:
                await self._take(node)
            except ConfigError as error:
                refusal = error
        if len(self._reserved) < self._config.num_hosts and refusal is not None:
            if self._may_be_away:
                logger.warning("a node of Ray does not join yet: %s", refusal)
                return
            raise ConfigError(
                f"{len(self._reserved)} hosts of Ray, expected num_hosts={self._config.num_hosts}: "
                f"{refusal}"
            ) from refusal

    async def _take(self, node: RayNode) -> Host:
        """Start our server and its monitor on a node. Raises: ConfigError."""
        with waiting("the hosts of Ray", on=f"node {node.address}"):
            reserved = await run_in_thread(self._cluster.reserve_node, node)
        try:
            monitor = await self._monitor_on(reserved.host)
        except BaseException:
            await run_in_thread(self._cluster.release_node, reserved)
            raise
        # From here on somebody watches it; before that a failure gives the node back.
        self._reserved[reserved.host.name] = reserved
        self._own(self._watch_host(reserved, monitor), f"keeper of host {reserved.host.name}")
        return reserved.host

    async def _monitor_on(self, host: Host) -> HostMonitor:
        assert host.placement is not None
        try:
            monitor = await self._runtime.spawn(
                HostMonitor,
                name=f"monitor of {host.name}",
                placement=host.placement,
                deadlines_s={"report": REPORT_WITHIN_S},
            )
            require_same_versions(host.name, await monitor.report(), make_own_report())
        except (ActorDied, TimeoutError, TypeError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"host {host.name!r} cannot be used: {error}; expected vla_rl there as it is here, "
                f"and {host.placement.address} to be reachable from here"
            ) from error
        return monitor

    async def _watch_host(self, reserved: ReservedNode, monitor: HostMonitor) -> None:
        """Report when one host leaves, and give back what it held."""
        cause = "its monitor ended"
        try:
            await monitor.wait_until_gone()
        except ActorDied as death:
            cause = death.cause
        try:
            await self._changes.put(Left(host=reserved.host, cause=cause))
        finally:  # also if this is cancelled while nothing reads the changes
            del self._reserved[reserved.host.name]
            await run_in_thread(self._cluster.release_node, reserved)

    async def _look(self, every_s: float) -> None:
        """Take each new node; one that is refused is looked at again the next time."""
        while True:
            await asyncio.sleep(every_s)
            known = {reserved.node.node_id for reserved in self._reserved.values()}
            for node in await run_in_thread(self._cluster.list_fitting_nodes):
                if node.node_id in known:
                    continue
                try:
                    host = await self._take(node)
                except ConfigError as error:
                    logger.warning("a node of Ray does not join yet: %s", error)
                else:
                    await self._changes.put(Joined(host=host))

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._end_changes()

    def _end_changes(self) -> None:
        while self._changes.full():  # the end must find room; what is dropped was never read
            self._changes.get_nowait()
        self._changes.put_nowait(None)

    async def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        try:
            if self._tasks:
                await asyncio.wait(list(self._tasks))
            await self._runtime.__aexit__(kind, error, traceback)
        finally:
            if self._ray is not None:
                # Each is taken out before it is released: a second cancellation releases none twice.
                while self._reserved:
                    _, reserved = self._reserved.popitem()
                    await run_in_thread(self._cluster.release_node, reserved)
                    del reserved  # Ray's handles in it must not outlive its shutdown
                await run_in_thread(_leave_cluster, self._ray)
            self._end_changes()


def _leave_cluster(ray: Any) -> None:
    """Leave the cluster."""
    # a handle that is collected later, while the next block joins again, would end the process
    gc.collect()
    ray.shutdown()


def _join_cluster(config: RayConfig) -> Any:
    """Import ray and join the cluster, or start one; return the module.

    Raises: ConfigError.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed, expected for hosts of a Ray cluster: pip install 'vla_rl[ray]'"
        ) from error
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST_RAY:
        raise ConfigError(
            f"Ray is {ray.__version__}, expected >= {'.'.join(map(str, OLDEST_RAY))}, which has "
            "token authentication: pip install --upgrade 'vla_rl[ray]'"
        )
    if ray.is_initialized():
        raise ConfigError(
            "this process has joined a Ray cluster already, expected none: let RayHosts join it"
        )
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if config.address == "local":
        # without an address of its own Ray asks a public one which interface leads there
        options |= {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        options |= {"num_cpus": config.num_hosts * config.cores_per_host}
    try:
        ray.init(address=config.address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at {config.address!r} cannot be joined: {error}; expected the address "
            "of its head, such as 10.0.0.1:6379, and its token in RAY_AUTH_TOKEN"
        ) from error
    return ray
