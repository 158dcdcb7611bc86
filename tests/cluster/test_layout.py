"""The layout of a run: GPUs in one word, shares of numbers, memory that suffices, what learns or acts on which host."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from vla_rl.actors import KeyPair, RemoteHost
from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.cluster.layout import (
    GIB,
    GpuRange,
    GpuRole,
    Needs,
    format_indices,
    format_layout,
    parse_gpu_range,
    require_memory,
    shares,
)
from vla_rl.cluster.run_layout import (
    RunShape,
    assign_engines,
    assign_ranks,
    find_learning_gpus,
    plan_run_layout,
    remove_hosts,
)
from vla_rl.errors import ConfigError


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(0, 200))
def test_parts_add_up_in_proportion_and_none_is_empty(weights: list[int], more: int) -> None:
    total = len(weights) + more
    parts = shares([Fraction(weight) for weight in weights], total)
    assert sum(parts) == total
    assert min(parts) >= 1
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    if min(exact) >= 1:
        assert all(abs(part - ideal) < 1 for part, ideal in zip(parts, exact, strict=True))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("node1", [GpuRange("node1", None)]),
        ("node1:3", [GpuRange("node1", (3,))]),
        ("node1:0-2,7", [GpuRange("node1", (0, 1, 2, 7))]),
        ("node[1-2]:0", [GpuRange("node1", (0,)), GpuRange("node2", (0,))]),
        ("a[3,1]b", [GpuRange("a3b", None), GpuRange("a1b", None)]),
    ],
)
def test_a_word_names_a_part_for_each_host(word: str, expected: list[GpuRange]) -> None:
    assert list(parse_gpu_range(word)) == expected


def test_numbers_of_hosts_keep_their_leading_zeros() -> None:
    assert [part.host for part in parse_gpu_range("node[08-10]")] == ["node08", "node09", "node10"]
    assert [part.host for part in parse_gpu_range("node[8-10]")] == ["node8", "node9", "node10"]


@pytest.mark.parametrize("word", ["", ":0", "a:", "a:b", "a[]:0", "a[1:0", "a:0:1", "a[1][2]"])
def test_a_word_of_another_form_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="names no GPUs, expected HOST, HOST:0-5 or"):
        parse_gpu_range(word)


@pytest.mark.parametrize(
    ("word", "part"),
    [("a:5-0", "5-0"), ("a:0,", ""), ("a:0-", "0-"), ("a[x]", "x"), ("a:0-200000", "0-200000")],
)
def test_a_part_that_is_no_range_is_refused_by_name(word: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{part}' in '.*' is no range"):
        parse_gpu_range(word)


def test_a_gpu_that_is_named_twice_is_refused() -> None:
    # two ranks, or a rank and nothing, would be on it
    with pytest.raises(ConfigError, match=r"'a:0-3,2' names GPU 2 twice, expected once"):
        parse_gpu_range("a:0-3,2")


def test_indices_are_spelt_in_the_shortest_form() -> None:
    assert format_indices((0, 1, 2, 3, 5, 7, 8)) == "0-3,5,7-8"
    assert format_indices(()) == ""


@given(st.sets(st.integers(0, 20), min_size=1))
def test_what_is_spelt_is_read_again(indices: set[int]) -> None:
    rising = tuple(sorted(indices))
    assert parse_gpu_range(f"a:{format_indices(rising)}") == (GpuRange("a", rising),)


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


def host(name: str, num_gpus: int, *, is_local: bool = False, gib: int = 80) -> Host:
    gpus = tuple(Gpu(name="H100", memory_bytes=gib * GIB, device=str(k)) for k in range(num_gpus))
    placement = RemoteHost(
        address="tcp://10.0.0.2:7070",
        server_public_key="",
        client_keys=KeyPair(public="of ours", secret="of ours"),
        env={"A": "1"},
    )
    return Host(
        name=name,
        resources=HostResources(num_cores=16, memory_bytes=64 * GIB, gpus=gpus),
        placement=None if is_local else placement,
    )


LOCAL = host("this host", 8, is_local=True)


def test_this_host_learns_and_every_gpu_of_the_others_acts() -> None:
    shape = RunShape(num_envs=16, num_ranks=6)
    layout = plan_run_layout([LOCAL, host("gpu2", 4), host("cpu3", 0)], shape)
    assert format_layout(layout).splitlines() == [
        "layout apart: 6 learner ranks, 5 engines, 32 simulators on 3 hosts",
        "  host       GPUs  learn      act          simulators",
        "  this host  0-5   ranks 0-5  -            -",
        "  gpu2       0-3   -          engines 0-3  16",
        "  cpu3       CPU   -          engine 4     16",
    ]


def test_the_first_gpu_here_acts_too_if_this_host_runs_episodes() -> None:
    shape = RunShape(num_envs=16, num_ranks=2, local_rollout=True)
    layout = plan_run_layout([LOCAL, host("gpu2", 1)], shape)
    assert format_layout(layout).splitlines() == [
        "layout both: 2 learner ranks, 2 engines, 32 simulators on 2 hosts",
        "  host       GPUs  learn   act       simulators",
        "  this host  0     rank 0  engine 0  16",
        "             1     rank 1  -",
        "  gpu2       0     -       engine 1  16",
    ]


def test_a_run_on_cpus_has_one_engine_on_each_host() -> None:
    layout = plan_run_layout([LOCAL, host("gpu2", 4)], RunShape(num_envs=4, uses_gpus=False))
    assert [(rank_device.host, rank_device.gpus) for rank_device in layout.engines] == [
        ("gpu2", ())
    ]
    assert [rank_device.gpu for rank_device in layout.ranks] == [None]


def test_the_engines_of_a_host_share_its_environments() -> None:
    engines = assign_engines(host("gpu2", 3), RunShape(num_envs=8))
    assert [(engine.host.name, engine.num_envs) for engine in engines] == [
        ("gpu2:0", 3),
        ("gpu2:1", 3),
        ("gpu2:2", 2),
    ]
    placement = engines[1].host.placement
    assert placement is not None
    assert placement.env == {"A": "1", "CUDA_VISIBLE_DEVICES": "1"}


def test_a_host_with_one_engine_keeps_its_name() -> None:
    (alone,) = assign_engines(host("gpu2", 1), RunShape(num_envs=8))
    (several,) = assign_engines(host("gpu2", 4), RunShape(num_envs=8, spans_gpus=True))
    assert (alone.host.name, several.host.name) == ("gpu2", "gpu2")
    assert several.host.placement is not None
    assert several.host.placement.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_more_gpus_than_environments_are_refused_with_the_inequality() -> None:
    with pytest.raises(ConfigError, match=r"num_envs=2 < 4 engines on host 'gpu2'.*gpus = \"0-1\""):
        plan_run_layout([LOCAL, host("gpu2", 4)], RunShape(num_envs=2))


def test_every_engine_of_a_host_gets_environments_of_every_kind() -> None:
    shape = RunShape(num_envs=12, kinds={"simulators": 5, "text": 7})
    engines = assign_engines(host("gpu2", 3), shape)
    assert [engine.kinds for engine in engines] == [
        {"simulators": 2, "text": 2},
        {"simulators": 2, "text": 2},
        {"simulators": 1, "text": 3},
    ]
    assert [engine.num_envs for engine in engines] == [4, 4, 4]
    (alone,) = assign_engines(host("gpu2", 1), shape)
    assert alone.kinds == shape.kinds


def test_an_engine_without_environments_of_a_kind_is_refused_with_the_inequality() -> None:
    shape = RunShape(num_envs=8, kinds={"simulators": 2, "text": 6})
    with pytest.raises(
        ConfigError, match=r"simulators\.num_envs=2 < 3 engines on host 'gpu2'.*gpus = \"0-1\""
    ):
        plan_run_layout([LOCAL, host("gpu2", 3)], shape)


def test_a_gpu_or_a_host_that_is_too_small_is_refused_with_the_inequality() -> None:
    small = host("gpu2", 1, gib=12)
    with pytest.raises(
        ConfigError, match=r"host 'gpu2' has 12\.0 GiB, expected >= 14\.0 for an eng"
    ):
        plan_run_layout([LOCAL, small], RunShape(num_envs=4), Needs(acting_bytes=14 * GIB))
    with pytest.raises(ConfigError, match=r"'gpu2' has 64\.0 GiB of memory, expected >= 80\.0: 40"):
        plan_run_layout([LOCAL, small], RunShape(num_envs=40), Needs(simulator_bytes=2 * GIB))


def test_named_gpus_learn_and_the_others_act() -> None:
    shape = RunShape(num_envs=16, num_ranks=6, learners=("here:0-1", "gpu2:0-1", "gpu3"))
    layout = plan_run_layout([LOCAL, host("gpu2", 4), host("gpu3", 2)], shape)
    assert format_layout(layout).splitlines() == [
        "layout apart: 6 learner ranks, 2 engines, 16 simulators on 3 hosts",
        "  host       GPUs  learn      act          simulators",
        "  this host  0-1   ranks 0-1  -            -",
        "  gpu2       0-1   ranks 2-3  -            16",
        "             2-3   -          engines 0-1",
        "  gpu3       0-1   ranks 4-5  -            -",
    ]
    engines = assign_engines(host("gpu2", 4), shape)
    assert [engine.host.placement.env["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["2", "3"]  # type: ignore[union-attr]
    lost = replace(shape, num_ranks=5, lost=(("here", 0),))
    ranks = plan_run_layout([LOCAL, host("gpu2", 4), host("gpu3", 2)], lost).ranks
    assert [(rank.host, rank.gpu) for rank in ranks][:2] == [("this host", 1), ("gpu2", 0)]


def test_ranks_on_cpus_are_dealt_evenly_and_tensor_groups_stay_together() -> None:
    shape = RunShape(num_envs=4, num_ranks=6, learners=("here", "a"), uses_gpus=False, group_size=2)
    layout = plan_run_layout([LOCAL, host("a", 0), host("b", 0)], shape)
    assert [rank.host for rank in layout.ranks] == ["this host"] * 4 + ["a"] * 2
    assert format_layout(layout).splitlines()[2:] == [
        "  this host  CPU   ranks 0-3  -         -",
        "  a          CPU   ranks 4-5  -         -",
        "  b          CPU   -          engine 0  4",
    ]


@pytest.mark.parametrize(
    ("learners", "told"),
    [
        (("gpu3",), r"names the host 'gpu3', expected one of the 3 hosts .* such as 'gpu2'"),
        (("gpu2:0-4",), r"names GPU 4 of host 'gpu2', which has GPUs 0 to 3"),
        (("gpu2:0", "gpu2:1"), r"names the host 'gpu2' 2 times"),
        (("gpu2", "cpu3"), r"names 'cpu3', which has no GPU, beside hosts that have some"),
        (("gpu2:0-1",), r"learner.ranks is 4, but cluster.learners 'gpu2:0-1' names 2 GPUs"),
        (("here:0", "gpu2:0-2"), r"tensor_parallel is 2, and ranks 0 to 1 would be on 'this host'"),
    ],
)
def test_learners_that_cannot_be_placed_are_refused(learners: tuple[str, ...], told: str) -> None:
    shape = RunShape(num_envs=8, num_ranks=4, learners=learners, group_size=2)
    with pytest.raises(ConfigError, match=told):
        plan_run_layout([LOCAL, host("gpu2", 4), host("cpu3", 0)], shape)


def test_learners_that_leave_nothing_to_act_are_refused() -> None:
    shape = RunShape(num_envs=8, num_ranks=4, learners=("gpu2",))
    with pytest.raises(ConfigError, match="leaves no GPU and no CPU of another host to act"):
        plan_run_layout([LOCAL, host("gpu2", 4)], shape)


def host_with_gpus(name: str, gpus: int) -> Host:
    gpu = Gpu(name="H100", memory_bytes=80)
    return Host(
        name=name, resources=HostResources(num_cores=8, memory_bytes=64, gpus=(gpu,) * gpus)
    )


HOSTS = (host_with_gpus("desk", 2), host_with_gpus("node1", 4), host_with_gpus("node2", 4))


def rank_devices(
    *learners: str, ranks: int, hosts: tuple[Host, ...] = HOSTS, **others
) -> list[tuple]:
    found = assign_ranks(learners, hosts, ranks, **others)
    assert [rank_device.rank for rank_device in found] == list(range(len(found)))
    return [(rank_device.host, rank_device.gpu) for rank_device in found]


def test_ranks_are_on_the_gpus_that_are_named_in_that_order() -> None:
    assert rank_devices("node2:3,0", "here", ranks=4) == [
        ("node2", 3),
        ("node2", 0),
        ("desk", 0),
        ("desk", 1),
    ]


def test_a_gpu_that_was_lost_has_no_rank() -> None:
    assert rank_devices("node1", ranks=3, lost={("node1", 1)}) == [
        ("node1", 0),
        ("node1", 2),
        ("node1", 3),
    ]


def test_more_ranks_than_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"learner.ranks is 5, but cluster.learners 'node1' names 4 GPUs"
    ):
        rank_devices("node1", ranks=5)


def test_ranks_that_share_layers_are_on_one_host() -> None:
    assert len(rank_devices("here", "node1", ranks=6, group_size=2)) == 6
    with pytest.raises(ConfigError, match="ranks 0 to 3 would be on 'desk' and 'node1'"):
        rank_devices("here", "node1", ranks=4, group_size=4)


@pytest.mark.parametrize(
    ("learners", "message"),
    [
        (("nod1",), "names the host 'nod1', expected one of the 3 hosts .* such as 'node1'"),
        (("node1:4",), "names GPU 4 of host 'node1', which has GPUs 0 to 3"),
        (("node1:0", "node1:1"), "names the host 'node1' 2 times, expected once"),
    ],
)
def test_a_host_or_gpu_that_is_not_there_is_refused(
    learners: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_devices(*learners, ranks=1)


def test_without_gpus_ranks_are_dealt_to_the_hosts_in_whole_groups() -> None:
    hosts = (host_with_gpus("desk", 0), host_with_gpus("a", 0), host_with_gpus("b", 0))
    assert rank_devices("a", "b", ranks=3, hosts=hosts) == [("a", None), ("a", None), ("b", None)]
    assert rank_devices("a", "b", ranks=4, hosts=hosts, group_size=4) == [("a", None)] * 4


def test_hosts_with_and_without_gpus_do_not_learn_together() -> None:
    with pytest.raises(ConfigError, match="names 'bare', which has no GPU, beside hosts that have"):
        rank_devices("node1", "bare", ranks=2, hosts=(*HOSTS, host_with_gpus("bare", 0)))


def test_a_host_learns_with_the_gpus_that_are_named_or_with_all() -> None:
    learners = ("node1:1-2", "node2")
    assert find_learning_gpus("node1", 4, learners) == {1, 2}
    assert find_learning_gpus("node2", 4, learners) == {0, 1, 2, 3}
    assert find_learning_gpus("node3", 4, learners) is None


def test_learners_without_a_lost_host_name_the_others_as_before() -> None:
    assert remove_hosts(("node[1-2]:0-1", "here"), {"node1"}) == ("node2:0,1", "here")
