"""A layout: GPUs in one word, numbers in proportion, memory that has to suffice."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.cluster.layout import (
    GIB,
    GpuRange,
    GpuRole,
    Needs,
    format_indices,
    parse_gpu_range,
    require_memory,
    shares,
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
