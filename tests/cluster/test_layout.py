"""Who does what on which host and GPU."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from vla_rl.cluster import (
    Gpu,
    Host,
    HostResources,
    Layout,
    LayoutConfig,
    Needs,
    layout_of,
    layout_table,
    layout_with,
)
from vla_rl.errors import ConfigError

GIB = 2**30


def host(name: str, *, gpus: int = 8, cores: int = 16, memory_gib: int = 512) -> Host:
    """Make a host with equal GPUs of 80 GiB."""
    gpu = Gpu(name="H100", memory_bytes=80 * GIB)
    resources = HostResources(
        num_cores=cores, memory_bytes=memory_gib * GIB, gpus=tuple([gpu] * gpus)
    )
    return Host(name=name, resources=resources)


def placed(config: LayoutConfig, *hosts: Host, num_simulators: int = 64) -> Layout:
    return layout_of(config, hosts, num_simulators=num_simulators)


def gpus_of_ranks(layout: Layout) -> list[tuple[str, int | None]]:
    return [(place.host, place.gpu) for place in layout.ranks]


def gpus_of_engines(layout: Layout) -> list[tuple[str, int | None]]:
    return [(place.host, gpu) for place in layout.engines for gpu in (place.gpus or (None,))]


def test_together_every_gpu_learns_and_acts() -> None:
    layout = placed(LayoutConfig(), host("a", gpus=2), host("b", gpus=2))
    everywhere = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert gpus_of_ranks(layout) == gpus_of_engines(layout) == everywhere
    assert [place.rank for place in layout.ranks] == [0, 1, 2, 3]
    assert (layout.num_simulators_on("a"), layout.num_simulators_on("b")) == (32, 32)


def test_apart_the_gpus_that_are_named_learn_and_all_others_act() -> None:
    layout = placed(LayoutConfig(mode="apart", learners=("a:0-5",)), host("a"))
    assert gpus_of_ranks(layout) == [("a", gpu) for gpu in range(6)]
    assert gpus_of_engines(layout) == [("a", 6), ("a", 7)]


def test_apart_the_first_hosts_with_gpus_learn_if_they_are_counted() -> None:
    hosts = [host("login", gpus=0), *(host(f"n{number}", gpus=1) for number in range(3))]
    layout = placed(LayoutConfig(mode="apart", num_learner_hosts=2), *hosts)
    assert gpus_of_ranks(layout) == [("n0", 0), ("n1", 0)]
    assert gpus_of_engines(layout) == [("n2", 0)]
    assert [place.host for place in layout.simulators] == ["login", "n2"]


def test_in_mode_both_the_learners_act_too() -> None:
    layout = placed(
        LayoutConfig(mode="both", learners=("n[0-1]",)), *(host(f"n{k}", gpus=2) for k in range(3))
    )
    assert gpus_of_ranks(layout) == [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)]
    assert len(gpus_of_engines(layout)) == 6
    assert len(layout.simulators) == 3


def test_simulators_are_dealt_in_proportion_to_cores() -> None:
    layout = placed(
        LayoutConfig(),
        host("small", cores=8),
        host("large", cores=32),
        host("none", gpus=0, cores=24),
        num_simulators=64,
    )
    assert [place.num_simulators for place in layout.simulators] == [8, 32, 24]
    assert {place.host for place in layout.engines} == {"small", "large"}


def test_hosts_without_any_gpu_learn_and_act_on_their_cpus() -> None:
    layout = placed(
        LayoutConfig(mode="apart", learners=("b",)), host("a", gpus=0), host("b", gpus=0)
    )
    assert gpus_of_ranks(layout) == [("b", None)]
    assert gpus_of_engines(layout) == [("a", None)]
    assert [place.host for place in layout.simulators] == ["a"]


def test_an_engine_takes_neighbouring_gpus_of_one_host() -> None:
    layout = placed(
        LayoutConfig(mode="apart", learners=("a:0-3",), gpus_per_engine=2), host("a"), host("b")
    )
    assert [(place.host, place.gpus) for place in layout.engines] == [
        ("a", (4, 5)),
        ("a", (6, 7)),
        *(("b", (gpu, gpu + 1)) for gpu in (0, 2, 4, 6)),
    ]


def test_a_host_that_joins_acts_and_moves_nothing() -> None:
    hosts = [host("a", gpus=2), host("b", gpus=2)]
    before = placed(LayoutConfig(), *hosts)
    after = layout_with(before, hosts, host("late", gpus=1, cores=8), LayoutConfig())
    assert after.ranks == before.ranks
    assert after.engines[:-1] == before.engines
    assert (after.engines[-1].engine, after.engines[-1].host) == (4, "late")
    assert after.simulators[:-1] == before.simulators
    assert after.num_simulators_on("late") == 16
    with pytest.raises(ConfigError, match="'late' joined twice"):
        layout_with(after, hosts, host("late"), LayoutConfig())


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            LayoutConfig(mode="apart", learners=("a", "b")),
            "12 of 12 GPUs learn, expected at most 11",
        ),
        (LayoutConfig(mode="apart", learners=("aa",)), "the host 'aa'.* such as 'a'"),
        (LayoutConfig(mode="apart", learners=("b:2-4",)), "GPU 2-4 of host 'b'.* GPUs 0 to 3"),
        (LayoutConfig(mode="apart", learners=("c",)), "a GPU of host 'c', which has no GPU"),
        (LayoutConfig(mode="apart", learners=("a:0-3", "a:3")), "GPU 3 of host 'a' twice"),
        (LayoutConfig(mode="both", num_learner_hosts=3), "is 3, expected <= 2"),
        (LayoutConfig(gpus_per_engine=8), "host 'b' has 4 GPUs that act.* gpus_per_engine=8"),
    ],
)
def test_a_layout_that_cannot_be_placed_is_refused_with_the_inequality(
    config: LayoutConfig, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        placed(config, host("a"), host("b", gpus=4), host("c", gpus=0))


def test_a_host_left_without_simulators_is_named() -> None:
    with pytest.raises(ConfigError, match=r"num_simulators=1 < 2 hosts .* 'b' would have none"):
        placed(LayoutConfig(), host("a"), host("b"), num_simulators=1)


def test_no_host_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 hosts"):
        placed(LayoutConfig())
    with pytest.raises(ConfigError, match="2 hosts have the name 'a'"):
        placed(LayoutConfig(), host("a"), host("a"))


@pytest.mark.parametrize(
    ("needs", "error"),
    [
        (
            Needs(learning_bytes=81 * GIB),
            r"GPU 0 \(H100\) of host 'a' has 80.0 .*81.0 for a learner",
        ),
        (Needs(acting_bytes=90 * GIB), r"GPU 6 \(H100\) of host 'a' has 80.0 .*90.0 for an engine"),
        (
            Needs(simulator_bytes=8 * GIB, rank_host_bytes=GIB),
            "host 'a' has 512.0 GiB of memory, expected >= 518.0: 64 simulators of 8.00 . 6 learner",
        ),
    ],
)
def test_too_little_memory_is_refused_with_the_host_and_the_inequality(
    needs: Needs, error: str
) -> None:
    config = LayoutConfig(mode="apart", learners=("a:0-5",))
    with pytest.raises(ConfigError, match=error):
        layout_of(config, [host("a")], num_simulators=64, needs=needs)


def test_a_rank_and_an_engine_on_one_gpu_are_compared_with_what_both_need() -> None:
    fits = Needs(learning_bytes=50 * GIB, acting_bytes=40 * GIB, both_bytes=75 * GIB)
    layout_of(LayoutConfig(), [host("a")], num_simulators=1, needs=fits)
    too_much = Needs(both_bytes=90 * GIB)
    with pytest.raises(ConfigError, match=r"expected >= 90\.0 for a learner rank and an engine"):
        layout_of(LayoutConfig(), [host("a")], num_simulators=1, needs=too_much)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"learners": ("a",)}, "mode is 'together', in which every GPU learns"),
        ({"mode": "apart"}, "exactly one of `learners` and `num_learner_hosts`, got neither"),
        ({"mode": "both", "learners": ("a",), "num_learner_hosts": 1}, "got both"),
        ({"mode": "apart", "num_learner_hosts": 0}, "expected >= 1 host"),
        ({"gpus_per_engine": 0}, "expected >= 1 GPU"),
        ({"mode": "apart", "learners": ("a:5-2",)}, "'5-2' in 'a:5-2' is no range"),
        ({"mode": "apart", "learners": ("a:",)}, "names no GPUs, expected HOST"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    wrong: dict[str, object], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        LayoutConfig(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_the_table_has_a_line_for_each_range_of_gpus() -> None:
    layout = placed(
        LayoutConfig(mode="apart", learners=("node1:0-5",)), host("login", gpus=0), host("node1")
    )
    assert layout_table(layout).splitlines() == [
        "layout apart: 6 learner ranks, 2 engines, 64 simulators on 2 hosts",
        "  host   GPUs  learn      act          simulators",
        "  login  -     -          -            51",
        "  node1  0-5   ranks 0-5  -            13",
        "         6-7   -          engines 0-1",
    ]


hosts_of_a_run = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 64)), min_size=1, max_size=6
).map(
    lambda sizes: [
        host(f"n{number}", gpus=gpus, cores=cores) for number, (gpus, cores) in enumerate(sizes)
    ]
)


@given(
    hosts_of_a_run, st.integers(0, 200), st.sampled_from(["together", "apart", "both"]), st.data()
)
def test_every_gpu_has_its_role_and_every_simulator_its_host(
    hosts: list[Host], more: int, mode: str, data: st.DataObject
) -> None:
    gpus = [(each.name, gpu) for each in hosts for gpu in range(len(each.resources.gpus))]
    if mode != "together" and len(gpus) < 2:
        return
    learners = set(gpus)
    if mode != "together":
        learners = set(
            data.draw(
                st.lists(st.sampled_from(gpus), min_size=1, max_size=len(gpus) - 1, unique=True)
            )
        )
    words = () if mode == "together" else tuple(f"{name}:{gpu}" for name, gpu in sorted(learners))
    config = LayoutConfig(mode=mode, learners=words)  # type: ignore[arg-type]
    layout = layout_of(config, hosts, num_simulators=len(hosts) + more)
    if gpus:
        assert set(gpus_of_ranks(layout)) == learners
        acting = set(gpus) - (learners if mode == "apart" else set())
        assert Counter(gpus_of_engines(layout)) == Counter(acting)
    assert [place.rank for place in layout.ranks] == list(range(len(layout.ranks)))
    assert sum(place.num_simulators for place in layout.simulators) == len(hosts) + more
    chosen = {place.host: place.num_simulators for place in layout.simulators}
    acts = [name for name, _ in gpus_of_engines(layout)]
    cores = {
        each.name: each.resources.num_cores
        * (Fraction(acts.count(each.name), len(each.resources.gpus)) if each.resources.gpus else 1)
        for each in hosts
        if each.name in chosen
    }
    exact = {name: (len(hosts) + more) * cores[name] / sum(cores.values()) for name in chosen}
    assert min(chosen.values()) >= 1
    if min(exact.values()) >= 1:
        assert all(abs(chosen[name] - exact[name]) < 1 for name in chosen)
