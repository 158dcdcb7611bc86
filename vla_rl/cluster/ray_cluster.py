"""Nodes of a Ray cluster: what they have, what is reserved, our host server on each.

Every call here waits for Ray, so `RayHosts` makes it on a thread. Ray itself is handed in. A Ray actor on a
node starts our host server there as its child.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.actors import KeyPair, RemoteHost
from vla_rl.actors.keys import make_keys, read_public_key
from vla_rl.cluster.config import RayConfig
from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.errors import ConfigError
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.processes import die_with_parent_only, query_gpus

_PREFIX = "vla_rl-ray-host-"
_SERVING = "serving actors on "


class HostStarter:
    """Starts `python -m vla_rl.actors.host` as its child; Ray runs it as an actor.

    Takes and returns nothing but text and numbers: Ray would pickle anything else. The secret key is
    made here and never leaves the node.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def start_server(self, interface: str, client_key: str, lost_after_s: float) -> list[str]:
        """Serve on a free port of `interface`; return the address and the server's public key.

        Raises: RuntimeError with the last lines of the server if it ends.
        """
        remove_abandoned_folders(_PREFIX)
        # the server takes its keys from files; nobody else may enter the folder
        self._folder = OwnedFolder(_PREFIX)
        keys: Path = self._folder.path
        make_keys(keys, clients=())
        (keys / "client.pub").write_text(f"{client_key}\n", encoding="utf-8")
        command = [
            *(sys.executable, "-m", "vla_rl.actors.host", "--bind", f"tcp://{interface}:0"),
            *("--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")),
            *("--lost-after", str(lost_after_s)),
        ]
        parent = os.getpid()
        self._server = subprocess.Popen(
            command,
            env=_make_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ray kills its workers with SIGKILL, after which no code of ours runs
            preexec_fn=lambda: die_with_parent_only(parent),
            encoding="utf-8",
            errors="replace",
        )
        assert self._server.stdout is not None
        # Its output is read up to the line that has the port: it chooses that itself.
        words: list[str] = []
        for line in self._server.stdout:
            if line.startswith(_SERVING):
                public_key = read_public_key(keys / "server.pub")
                return [line.removeprefix(_SERVING).strip(), public_key]
            words.append(line.rstrip())
        raise RuntimeError(f"our host server ended: {' '.join(words[-5:])}")

    def list_gpus(self) -> list[str]:
        """Return the name and the bytes of each GPU of this node, in turn."""
        lines = query_gpus("name,memory.total").splitlines()
        rows = [line.rpartition(",") for line in lines if "," in line]
        return [word for name, _, mib in rows for word in (name.strip(), str(int(mib) * 2**20))]

    def stop_server(self) -> None:
        """End the server, and all that it started."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._folder.remove_folder()


def _make_environment() -> dict[str, str]:
    """Return this worker's environment without what Ray set for its own workers."""
    # Ray hides GPUs from an actor that reserves none, and takes all threads but one
    hidden = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RAY_AUTH_TOKEN"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


_PROBE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError

try:
    GcsClient(address=sys.argv[1], cluster_id=sys.argv[2]).get_all_node_info(timeout=10)
except AuthenticationError:
    print("refused")
else:
    print("answered")
"""
_PROBE_S = 60.0

_STOP_S = 10.0
"""Time in which our server on a node has to end. Ray notices a pulled cable only after a minute."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayNode:
    """A node that Ray believes alive."""

    node_id: str
    address: str
    cores: int
    gpus: int
    memory_bytes: int


def name_node(node: RayNode, nodes: Sequence[RayNode]) -> str:
    """Return the name of a node's host: its address, by which a user starts it and names it.

    With a part of its id if several of the nodes are on one machine, which have one address.
    """
    is_alone = sum(each.address == node.address for each in nodes) == 1
    return node.address if is_alone else f"{node.address}-{node.node_id[:8]}"


@dataclass(frozen=True)
class ReservedNode:
    """A node that the run has, and what holds it."""

    node: RayNode
    host: Host
    group: Any
    starter: Any


class RayCluster:
    """The nodes of one cluster, which this process has joined.

    Args:
        ray: the module.
        config: how much to take.
        keys: our own keys; the public one is sent to each node.
        lost_after_s: silence after which a host is lost.
    """

    def __init__(self, ray: Any, config: RayConfig, keys: KeyPair, lost_after_s: float) -> None:
        self._ray, self._config, self._keys = ray, config, keys
        self._lost_after_s = lost_after_s

    def require_authentication(self) -> None:
        """Ask the cluster something without a token.

        Raises: ConfigError if it answers, or if that cannot be found out.
        """
        context = self._ray.get_runtime_context()
        address, cluster_id = context.gcs_address, _get_cluster_id(self._ray)
        # asked from a process without a token, because our own settings do not show what it checks
        hidden = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        try:
            probe = subprocess.run(
                [sys.executable, "-c", _PROBE, address, cluster_id],
                env={**environment, "RAY_AUTH_MODE": "disabled"},
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                _explain_unchecked(address, f"no answer within {_PROBE_S:g} s")
            ) from error
        if probe.stdout.strip() == "answered":
            raise ConfigError(
                f"the Ray cluster at {address} has no authentication, expected token "
                "authentication: anyone who reaches it can run programs on all of its machines. "
                "Start it with RAY_AUTH_MODE=token, or set RayConfig.allow_open_cluster"
            )
        if probe.stdout.strip() != "refused":
            last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(_explain_unchecked(address, last))

    def list_nodes(self) -> list[RayNode]:
        """Return the nodes that Ray believes alive; of one that died it may do so for a minute."""
        return [
            RayNode(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cores=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                memory_bytes=int(node["Resources"].get("memory", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def list_fitting_nodes(self) -> list[RayNode]:
        """Return the nodes with what a host needs.

        Raises: ConfigError for a node of which only some GPUs are asked for.
        """
        config = self._config
        fitting = [
            node
            for node in self.list_nodes()
            if node.cores >= config.cores_per_host and node.gpus >= config.gpus_per_host
        ]
        for node in fitting:
            # Two programs on one node would each see all GPUs, because our server hands them out itself.
            if config.gpus_per_host and node.gpus != config.gpus_per_host:
                raise ConfigError(
                    f"node {node.address} has {node.gpus} GPUs, expected gpus_per_host="
                    f"{config.gpus_per_host} to be all of them; set it to {node.gpus}"
                )
        return fitting

    def require_resources(self) -> list[RayNode]:
        """Return the fitting nodes.

        Raises: ConfigError with the inequality if they are fewer than `num_hosts`. Ray itself would wait for ever.
        """
        config, fitting, total = (
            self._config,
            self.list_fitting_nodes(),
            self._ray.cluster_resources(),
        )
        for name, each in (("CPU", config.cores_per_host), ("GPU", config.gpus_per_host)):
            if config.num_hosts * each > total.get(name, 0):
                raise ConfigError(
                    f"num_hosts * {name}s per host = {config.num_hosts} * {each} = "
                    f"{config.num_hosts * each} > {total.get(name, 0):g}, which the Ray cluster has "
                    "in all; take fewer hosts, or add nodes"
                )
        if len(fitting) < config.num_hosts:
            raise ConfigError(
                f"num_hosts={config.num_hosts} > {len(fitting)} nodes of the Ray cluster with >= "
                f"{config.cores_per_host} CPUs and >= {config.gpus_per_host} GPUs; take fewer "
                "hosts, or add nodes"
            )
        return fitting

    def reserve_node(self, node: RayNode) -> ReservedNode:
        """Reserve what a host needs on a node, and start our server there.

        Raises: ConfigError naming the node if another program holds it, or the server does not
            start in time.
        """
        config, ray = self._config, self._ray
        bundle: dict[str, float] = {"CPU": config.cores_per_host}
        if config.gpus_per_host:
            bundle["GPU"] = config.gpus_per_host
        # A placement group, and not an actor with these resources: it stays if our actor there dies.
        group = ray.util.placement_group(
            [bundle], strategy="STRICT_PACK", _soft_target_node_id=node.node_id
        )
        try:
            if not group.wait(config.reserve_within_s) or self._get_node_id(group) != node.node_id:
                raise ConfigError(
                    f"node {node.address} did not give {bundle} within "
                    f"{config.reserve_within_s:g} s, because other programs hold it; wait for them, or "
                    "ask for less"
                )
            return self._started(node, group)
        except BaseException:
            ray.util.remove_placement_group(group)
            raise

    def release_node(self, reserved: ReservedNode) -> None:
        """End our server on a node, and give back what was reserved."""
        ray = self._ray
        # without the group's removal Ray would reserve the same on another node, unasked
        ray.util.remove_placement_group(reserved.group)
        try:
            ray.get(reserved.starter.stop_server.remote(), timeout=_STOP_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.info("host %s did not end in order: %s", reserved.host.name, error)
        ray.kill(reserved.starter)

    def _get_node_id(self, group: Any) -> str:
        (node_id,) = self._ray.util.placement_group_table(group)["bundles_to_node_id"].values()
        return str(node_id)

    def _started(self, node: RayNode, group: Any) -> ReservedNode:
        ray, within_s = self._ray, self._config.reserve_within_s
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        starter = (
            ray.remote(HostStarter)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=affinity(node.node_id, soft=False),
                # hiding GPUs from single processes has broken NCCL; our server hands them out
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            )
            .remote()
        )
        try:
            call = starter.start_server.remote(node.address, self._keys.public, self._lost_after_s)
            address, public_key = ray.get(call, timeout=within_s)
            words = ray.get(starter.list_gpus.remote(), timeout=within_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            ray.kill(starter)
            raise ConfigError(
                f"our host server did not start on node {node.address} within {within_s:g} s: "
                f"{error}; vla_rl must be installed there as it is here"
            ) from error
        # Ray's own list of resources has numbers alone; a layout needs the memory of each.
        gpus = [
            Gpu(name=name, memory_bytes=int(size))
            for name, size in zip(words[::2], words[1::2], strict=True)
        ]
        placement = RemoteHost(
            address=address,
            server_public_key=public_key,
            client_keys=self._keys,
            lost_after_s=self._lost_after_s,
        )
        resources = HostResources(
            num_cores=self._config.cores_per_host,
            memory_bytes=node.memory_bytes,
            gpus=tuple(gpus[: self._config.gpus_per_host]),
        )
        host = Host(
            name=name_node(node, self.list_nodes()), resources=resources, placement=placement
        )
        return ReservedNode(node, host, group, starter)


def _get_cluster_id(ray: Any) -> str:
    # without it a client asks for it first, 20 times a second apart if it is refused
    return str(ray._private.worker.global_worker.gcs_client.cluster_id.hex())


def _explain_unchecked(address: str, why: str) -> str:
    return (
        f"the authentication of the Ray cluster at {address} could not be checked ({why}), expected "
        "token authentication; set RayConfig.allow_open_cluster if you know that it has it"
    )
