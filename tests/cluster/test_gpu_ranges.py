"""One word names GPUs of several hosts, and rising indices have a shortest form."""

import pytest
from hypothesis import given, strategies as st

from vla_rl.cluster.gpu_ranges import GpuRange, parse_gpu_range, spell_indices
from vla_rl.errors import ConfigError


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
    assert spell_indices((0, 1, 2, 3, 5, 7, 8)) == "0-3,5,7-8"
    assert spell_indices(()) == ""


@given(st.sets(st.integers(0, 20), min_size=1))
def test_what_is_spelt_is_read_again(indices: set[int]) -> None:
    rising = tuple(sorted(indices))
    assert parse_gpu_range(f"a:{spell_indices(rising)}") == (GpuRange("a", rising),)
