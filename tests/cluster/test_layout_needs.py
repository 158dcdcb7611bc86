"""A layout that needs more memory than a GPU or a host has is refused with the inequality."""

import pytest

from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.cluster.layout_config import Needs
from vla_rl.cluster.layout_needs import GIB, require_memory
from vla_rl.cluster.roles import GpuRole
from vla_rl.errors import ConfigError

HOST = Host(
    name="a",
    resources=HostResources(
        num_cores=8, memory_bytes=64 * GIB, gpus=(Gpu(name="H100", memory_bytes=80 * GIB),)
    ),
)
LEARNS, ACTS, BOTH = (
    GpuRole("a", 0, learns, acts) for learns, acts in ((True, False), (False, True), (True, True))
)


@pytest.mark.parametrize(
    ("role", "field", "who"),
    [
        (LEARNS, "learning_bytes", "a learner rank; take more"),
        (ACTS, "acting_bytes", "an engine; leave it out"),
        (BOTH, "both_bytes", "a learner rank and an engine; take more"),
    ],
)
def test_a_gpu_has_room_for_what_it_does_and_not_for_more(
    role: GpuRole, field: str, who: str
) -> None:
    require_memory(Needs(**{field: 80 * GIB}), [HOST], [role], {})
    with pytest.raises(
        ConfigError, match=rf"GPU 0 \(H100\) of host 'a' has 80.0 GiB, expected >= 80.5 for {who}"
    ):
        require_memory(Needs(**{field: 80 * GIB + GIB // 2}), [HOST], [role], {})


def test_a_gpu_that_only_acts_needs_no_room_for_learning() -> None:
    require_memory(Needs(learning_bytes=99 * GIB, both_bytes=99 * GIB), [HOST], [ACTS], {})


def test_a_host_has_room_for_its_simulators_and_ranks_together() -> None:
    needs = Needs(simulator_bytes=2 * GIB, rank_host_bytes=32 * GIB)
    require_memory(needs, [HOST], [LEARNS], {"a": 16, "b": 99})
    with pytest.raises(
        ConfigError,
        match=r"host 'a' has 64.0 GiB of memory, expected >= 66.0: 17 simulators of 2.00 \+ 1 "
        r"learner ranks of 32.00",
    ):
        require_memory(needs, [HOST], [LEARNS], {"a": 17})


def test_needs_that_are_not_known_are_not_checked() -> None:
    require_memory(Needs(), [HOST], [BOTH], {"a": 10_000})


def test_a_cpu_that_learns_has_no_gpu_to_check() -> None:
    require_memory(Needs(learning_bytes=99 * GIB), [HOST], [GpuRole("a", None, True, True)], {})
