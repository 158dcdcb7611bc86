"""Observations as one block: taken apart, put together, never aliased by accident."""

import gc
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.packing import NUM_BATCHES, BlockPacker, ObservationLayout, RowPacker
from vla_rl.env_workers.vector_rows import SharedBatch

CAMERAS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
        "state": spaces.Box(-1.0, 1.0, (8,), np.float32),
        "instruction": spaces.Text(40),
    }
)
NESTED = spaces.Tuple(
    (
        spaces.Discrete(5),
        spaces.Dict(
            {
                "a": spaces.MultiBinary(3),
                "b": spaces.Tuple((spaces.Box(-1, 1, (), np.float64), spaces.Text(9))),
            }
        ),
    )
)


def read_back(layout: ObservationLayout, observation: Any) -> Any:
    block, others = BlockPacker(layout).pack(observation)
    array: Any = block
    return layout.unpack_observation(
        array.array, others
    )  # a plain block: this process has no shared memory


@pytest.mark.parametrize(
    "space", [CAMERAS, NESTED, spaces.Box(-1, 1, (2, 3), np.float32), spaces.Text(5)]
)
def test_what_is_taken_apart_comes_back_equal_and_in_its_space(space: spaces.Space[Any]) -> None:
    space.seed(3)
    for _ in range(5):
        observation = space.sample()
        found = read_back(ObservationLayout(space), observation)
        assert space.contains(found)
        assert spell_out(found) == spell_out(observation)


def spell_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: spell_out(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(spell_out(part) for part in value)
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def test_large_arrays_are_views_of_the_block_and_small_ones_are_copies() -> None:
    layout = ObservationLayout(CAMERAS)
    block = np.zeros(layout.num_bytes, np.uint8)
    observation = layout.unpack_observation(block, ["text"])
    layout.pack_observation(
        {
            "image": np.ones((40, 40, 3), np.uint8),
            "state": np.ones(8, np.float32),
            "instruction": "x",
        },
        layout.get_arrays(block),
    )
    assert observation["image"].all()
    assert not observation["state"].any()
    # 40 * 40 * 3, a multiple of 64, and 8 floats in a line of their own
    assert layout.num_bytes == 4800 + 64


def test_rows_of_a_shared_batch_are_written_by_their_simulators() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    rows = [RowPacker(layout, batch.path, index, 2) for index in range(2)]
    batch.close()
    for index, row in enumerate(rows):
        state = np.full(8, index + 1, np.float32)
        block, others = row.pack(
            {
                "image": np.full((40, 40, 3), index, np.uint8),
                "state": state,
                "instruction": f"{index}",
            }
        )
        assert block is None
        batch.store_others(index, others)
    together = batch.get()
    assert together["state"].tolist() == [[1.0] * 8, [2.0] * 8]
    assert together["image"].shape == (2, 40, 40, 3)
    assert together["instruction"] == ("0", "1")
    assert batch.copy_row(1)["image"].tolist() == np.ones((40, 40, 3)).tolist()


def test_a_copy_stays_as_it_is_and_its_memory_is_used_again_when_it_is_gone() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    writer = RowPacker(layout, batch.path, 0, 2)
    batch.close()
    still: dict[str, Any] = {
        "image": np.zeros((40, 40, 3), np.uint8),
        "state": np.zeros(8, np.float32),
        "instruction": "",
    }
    batch.start_batch()
    writer.pack(still, batch.current)
    kept = batch.detach()["image"]
    address = kept.ctypes.data
    batch.start_batch()
    writer.pack({**still, "image": np.ones((40, 40, 3), np.uint8)}, batch.current)
    later = batch.detach()
    assert not kept[0].any()
    assert later["image"][0].all()
    assert later["image"].ctypes.data != address
    del kept
    gc.collect()
    batch.start_batch()
    writer.pack(still, batch.current)
    assert batch.detach()["image"].ctypes.data == address


def test_a_batch_is_copied_where_its_receiver_keeps_all_of_them() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 1)
    writer = RowPacker(layout, batch.path, 0, 1)
    batch.close()
    kept = []
    for number in range(3 * NUM_BATCHES):
        batch.start_batch()
        state = np.full(8, number, np.float32)
        writer.pack(
            {"image": np.zeros((40, 40, 3), np.uint8), "state": state, "instruction": ""},
            batch.current,
        )
        kept.append(batch.detach()["state"])
    assert [state[0, 0] for state in kept] == [*range(3 * NUM_BATCHES)]


def test_rows_that_are_not_written_are_those_of_the_batch_given_last() -> None:
    layout = ObservationLayout(CAMERAS)
    batch = SharedBatch(layout, 2)
    rows = [RowPacker(layout, batch.path, index, 2) for index in range(2)]
    batch.close()

    def write(index: int, number: float) -> None:
        state = np.full(8, number, np.float32)
        rows[index].pack(
            {"image": np.zeros((40, 40, 3), np.uint8), "state": state, "instruction": ""},
            batch.current,
        )

    for first in (1.0, 3.0):
        batch.start_batch()
        write(0, first)
        write(1, first + 1)
        whole = batch.detach()["state"]
        assert whole[:, 0].tolist() == [first, first + 1]
    batch.start_batch()
    write(0, 9.0)  # of a step that failed, and is never given
    batch.keep_other_rows()
    write(1, 5.0)
    assert batch.detach()["state"][:, 0].tolist() == [3.0, 5.0]
