"""The plan of an update: rows by rank and micro-batch, layers that ranks share."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig, MicroBatchSize
from vla_rl.learner.estimates.rank_memory import PolicySize, rank_memory
from vla_rl.learner.plan import (
    Lines,
    LineSlot,
    TensorPlan,
    deal,
    get_tensor_plan,
    micro_batches,
    plan_minibatches,
    plan_passes,
    require_tensor_plan,
    rows_imbalance,
)

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 70))
def test_every_row_is_dealt_once_and_no_rank_reads_a_row_more_than_the_mean(
    lengths: list[int], num_ranks: int
) -> None:
    dealt = deal(torch.tensor(lengths), num_ranks)
    assert sorted(row for index in dealt for row in index.tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in index.tolist()) for index in dealt]
    assert max(loads) - sum(lengths) / num_ranks <= max(lengths)


@given(lengths=LENGTHS, num_ranks=st.integers(2, 16), seed=st.integers(0, 99))
def test_loads_do_not_depend_on_the_order_of_the_rows(
    lengths: list[int], num_ranks: int, seed: int
) -> None:
    def loads(rows: list[int]) -> list[int]:
        dealt = deal(torch.tensor(rows), num_ranks)
        return sorted(sum(rows[row] for row in index.tolist()) for index in dealt)

    shuffled = np.random.default_rng(seed).permutation(lengths).tolist()
    assert loads(shuffled) == loads(lengths)


@given(
    lengths=LENGTHS,
    rows=st.integers(1, 9),
    tokens=st.one_of(st.none(), st.integers(1, 4000)),
    num_ranks=st.integers(1, 9),
)
def test_every_row_is_in_one_micro_batch_of_one_rank(
    lengths: list[int], rows: int, tokens: int | None, num_ranks: int
) -> None:
    size = MicroBatchSize(rows, tokens)
    ranks = plan_passes(torch.tensor(lengths), size, num_ranks)
    found = [row for rank in ranks for index in rank for row in index.tolist()]
    assert len(ranks) == num_ranks
    assert sorted(found) == list(range(len(lengths)))
    assert all(1 <= len(index) <= rows for rank in ranks for index in rank)


def test_one_rank_computes_the_micro_batches_of_one_process() -> None:
    lengths, size = torch.tensor([3, 10, 4, 9, 2]), MicroBatchSize(8, 20)
    (rank,) = plan_passes(lengths, size, 1)
    assert [index.tolist() for index in rank] == [
        index.tolist() for index in micro_batches(lengths, size)
    ]


@pytest.mark.parametrize("num_rows", [1, 3, 10])
def test_rows_of_one_length_are_dealt_in_turn(num_rows: int) -> None:
    dealt = deal(torch.full((num_rows,), 347), 4)
    assert [index.tolist() for index in dealt] == [
        list(range(rank, num_rows, 4)) for rank in range(4)
    ]


def test_512_ragged_episodes_load_64_ranks_evenly() -> None:
    rng = np.random.default_rng(0)
    decisions = rng.integers(1, 65, 512)  # an episode has 1 to 64 decisions
    lengths = torch.from_numpy(np.repeat(rng.integers(300, 700, 512), decisions))
    assert rows_imbalance(lengths, 64) <= 1.02


def test_a_trajectory_is_never_split_between_two_optimizer_steps() -> None:
    sequence = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    config = LearnerConfig(minibatch_trajectories=2, epochs=2)
    steps = plan_minibatches(sequence, config, weight_version=5)
    assert len(steps) == 4
    for epoch in (steps[:2], steps[2:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(7))
        seen = [set(sequence[rows].tolist()) for rows in epoch]
        assert seen[0].isdisjoint(seen[1])


def test_settings_of_ranks_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="shard is 'weights', expected gradients with one rank"):
        LearnerConfig(shard="weights")


def test_the_scaling_page_has_the_memory_of_ranks_that_share_layers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d. |]+) \|$", page, re.MULTILINE)
    assert [(ranks, each) for ranks, each, _ in rows] == [
        *(("2", "1"), ("2", "2")),
        *(("8", "1"), ("8", "2"), ("8", "4")),
    ]
    size = PolicySize(7_541_237_184, 0, bytes_each=2, num_cut=6_476_005_376)
    for ranks, each, numbers in rows:
        found = []
        for shard in ("gradients", "weights", "replicas"):
            config = LearnerConfig(ranks=int(ranks), tensor_parallel=int(each), shard=shard)
            found.append(f"{rank_memory(size, config).total / 2**30:.1f}")
        assert " | ".join(found) == numbers


def test_the_scaling_page_has_the_memory_of_the_arithmetic() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+|-) \| ([\d.]+|-) \|$", page, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 64]
    size = PolicySize(num_trained=7_541_237_184, num_frozen=0, bytes_each=2)
    for ranks, *numbers in rows:
        for shard, number in zip(("gradients", "weights", "replicas"), numbers, strict=True):
            if number != "-":
                config = LearnerConfig(ranks=int(ranks), shard=shard)
                assert f"{rank_memory(size, config).total / 2**30:.1f}" == number


def test_micro_batches_hold_rows_of_like_length_up_to_their_padded_tokens() -> None:
    lengths = torch.tensor([3, 10, 4, 9, 2])
    parts = micro_batches(lengths, MicroBatchSize(rows=8, tokens=20))
    assert [part.tolist() for part in parts] == [[1, 3], [2, 0, 4]]
    assert [part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=2))] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert [part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=8, tokens=5))] == [
        [1],
        [3],
        [2],
        [0],
        [4],
    ]


def test_short_rows_share_the_lines_that_longer_ones_leave_free() -> None:
    lengths = torch.tensor([3, 10, 4, 5, 2])
    parts = micro_batches(lengths, MicroBatchSize(rows=8, tokens=20))
    assert [part.tolist() for part in parts] == [[1, 3, 2], [0, 4]]  # 10 | 5 and 4; then 3 | 2
    assert [
        part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=2, tokens=20))
    ] == [
        [1, 3],
        [2, 0],
        [4],
    ]


def first_fit(lengths: list[int], size: MicroBatchSize) -> list[list[int]]:
    """What `micro_batches` promises, one row after the other."""
    assert size.tokens is not None
    parts, left = [], sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while left:
        width = max(lengths[left[0]], 1)
        part: list[int] = []
        lines: list[int] = []
        for row in left:
            line = next(
                (number for number, end in enumerate(lines) if end + lengths[row] <= width),
                len(lines),
            )
            if len(part) == size.rows or line >= max(1, size.tokens // width):
                continue
            lines += [0] * (line == len(lines))
            lines[line] += lengths[row]
            part.append(row)
        parts.append(part)
        left = [row for row in left if row not in part]
    return parts


@pytest.mark.parametrize(
    "size", [MicroBatchSize(5, 60), MicroBatchSize(100, 300), MicroBatchSize(1, 40)]
)
@pytest.mark.parametrize("longest", [6, 50])
def test_every_row_goes_to_the_first_line_with_room(size: MicroBatchSize, longest: int) -> None:
    lengths = np.random.default_rng(longest).integers(0, longest, 80).tolist()
    assert [part.tolist() for part in micro_batches(torch.tensor(lengths), size)] == first_fit(
        lengths, size
    )


def test_many_rows_are_put_together_in_a_time_that_grows_with_their_number() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(50, 4000, 20_000))
    began = time.process_time()
    parts = micro_batches(lengths, MicroBatchSize(32, 16_384))
    assert time.process_time() - began < 5.0  # looking at all rows for every part took minutes
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(20_000))


PLAN = TensorPlan(
    by_outputs=("up",), by_inputs=("down",), of_heads=("norm",), counts={"attention heads": 6}
)


class Planned:
    def tensor_plan(self) -> TensorPlan:
        return PLAN


class Unplanned: ...


def config(group: int) -> Any:
    return LearnerConfig(ranks=group, tensor_parallel=group)


def test_a_family_without_a_plan_is_refused_only_where_layers_are_shared() -> None:
    require_tensor_plan(Unplanned(), LearnerConfig())
    with pytest.raises(ConfigError, match="Unplanned has no plan for tensor parallelism"):
        require_tensor_plan(Unplanned(), config(2))
    with pytest.raises(ConfigError, match="Unplanned has no plan"):
        get_tensor_plan(Unplanned())


def test_numbers_that_the_ranks_cannot_deal_out_are_refused_by_name() -> None:
    assert get_tensor_plan(Planned()) is PLAN
    require_tensor_plan(Planned(), config(3))
    with pytest.raises(
        ConfigError,
        match="tensor_parallel is 4, but the trunk of Planned has 6 attention heads; expected a "
        "divisor of 6",
    ):
        require_tensor_plan(Planned(), config(4))


def test_the_numbers_that_are_cut_are_those_of_the_named_layers() -> None:
    network = nn.ModuleDict(
        {"up": nn.Linear(2, 3), "down": nn.Linear(3, 2, bias=False), "norm": nn.LayerNorm(2)}
    )
    network["down"].weight.requires_grad_(False)
    assert PLAN.num_cut(network, is_trained=True) == 2 * 3 + 3
    assert PLAN.num_cut(network, is_trained=False) == 3 * 2


def test_a_row_goes_to_the_first_line_with_room_and_begins_where_it_is_free() -> None:
    lines = Lines(10, 3)
    lines_taken = [lines.add_row(length) for length in (10, 6, 5, 4, 3)]
    assert lines_taken == [
        LineSlot(0, 0),
        LineSlot(1, 0),
        LineSlot(2, 0),
        LineSlot(1, 6),
        LineSlot(2, 5),
    ]
    assert lines.most_free == 2


def test_a_row_that_no_line_has_room_for_is_not_placed_and_takes_nothing() -> None:
    lines = Lines(4, 2)
    assert lines.add_row(3) == LineSlot(0, 0)
    assert lines.add_row(5) is None
    assert lines.most_free == 4
    assert lines.add_row(4) == LineSlot(1, 0)
    assert lines.add_row(1) == LineSlot(0, 3)
    assert lines.add_row(1) is None


def test_a_single_line_is_enough() -> None:
    lines = Lines(2, 1)
    assert [lines.add_row(1), lines.add_row(1), lines.add_row(1)] == [
        LineSlot(0, 0),
        LineSlot(0, 1),
        None,
    ]


@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 9))
def test_places_are_those_of_a_search_from_the_first_line(lengths: list[int], num: int) -> None:
    lines, free = Lines(12, num), [12] * num
    for length in lengths:
        line = next((line for line, left in enumerate(free) if left >= length), None)
        expected = None if line is None else LineSlot(line, 12 - free[line])
        assert lines.add_row(length) == expected
        if line is not None:
            free[line] -= length
        assert lines.most_free == max(free)
