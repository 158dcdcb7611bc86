"""The memory that a layout needs on each GPU and host, compared with what is there."""

from collections.abc import Mapping, Sequence

from vla_rl.cluster.hosts import Host
from vla_rl.cluster.layout_config import Needs
from vla_rl.cluster.roles import GpuRole
from vla_rl.errors import ConfigError

GIB = 2**30


def require_memory(
    needs: Needs, hosts: Sequence[Host], roles: Sequence[GpuRole], simulators: Mapping[str, int]
) -> None:
    """Raise ConfigError with the inequality if a GPU or a host has too little memory."""
    for host in hosts:
        of_host = [role for role in roles if role.host == host.name]
        for role in of_host:
            if role.gpu is not None:
                _require_gpu(needs, host, role, role.gpu)
        num_ranks = sum(role.learns for role in of_host)
        _require_host(needs, host, num_ranks, simulators.get(host.name, 0))


def _require_gpu(needs: Needs, host: Host, role: GpuRole, index: int) -> None:
    needed, what = needs.acting_bytes, "an engine"
    remedy = "leave it out of the hosts' GPUs, or take another GPU"
    if role.learns:
        remedy = "take more learner ranks, the mode 'apart', or another GPU"
        needed, what = needs.learning_bytes, "a learner rank"
    if role.learns and role.acts:
        needed, what = needs.both_bytes, "a learner rank and an engine"
    gpu = host.resources.gpus[index]
    if needed > gpu.memory_bytes:
        raise ConfigError(
            f"GPU {index} ({gpu.name}) of host {host.name!r} has {gpu.memory_bytes / GIB:.1f} GiB, "
            f"expected >= {needed / GIB:.1f} for {what}; {remedy}"
        )


def _require_host(needs: Needs, host: Host, num_ranks: int, num_simulators: int) -> None:
    simulators, ranks = num_simulators * needs.simulator_bytes, num_ranks * needs.rank_host_bytes
    has = host.resources.memory_bytes
    if simulators + ranks > has:
        raise ConfigError(
            f"host {host.name!r} has {has / GIB:.1f} GiB of memory, expected >= "
            f"{(simulators + ranks) / GIB:.1f}: {num_simulators} simulators of "
            f"{needs.simulator_bytes / GIB:.2f} + {num_ranks} learner ranks of "
            f"{needs.rank_host_bytes / GIB:.2f}; run fewer simulators, or add hosts"
        )
