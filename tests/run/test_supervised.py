"""Supervised weights are saved on the way, at the end, and when a signal or unreadable data ends
them early.
"""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from vla_rl.errors import CheckpointError, DataError
from vla_rl.run.supervised import train_supervised


class Batches:
    """Counts what it is trained on; does `at` an update what a test asks for, and has no room for some
    folders.
    """

    def __init__(self, at: dict[int, Any] | None = None, full: tuple[str, ...] = ()) -> None:
        self.num_learnt = 0
        self.saved: dict[str, int] = {}
        self._at, self._full = at or {}, full

    async def batch(self, number: int) -> int:
        if isinstance(self._at.get(number), Exception):
            raise self._at[number]
        return number

    async def learn(self, number: int, batch: int) -> None:
        assert number == batch == self.num_learnt + 1
        self.num_learnt = number
        if isinstance(self._at.get(number), signal.Signals):
            os.kill(os.getpid(), self._at[number])
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def save(self, folder: Path) -> None:
        if folder.name in self._full:
            raise CheckpointError(f"{folder} could not be written: no room.")
        self.saved[folder.name] = self.num_learnt

    async def train(self, tmp_path: Path, updates: int, save_every: int | None = None) -> int:
        async with asyncio.timeout(10):
            return await train_supervised(
                updates, self.batch, self.learn, self.save, tmp_path / "out", save_every=save_every
            )


async def test_weights_are_saved_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    batches = Batches()
    assert await batches.train(tmp_path, 4, save_every=2) == 0
    assert batches.saved == {"out-000002": 2, "out": 4}


async def test_a_full_disk_is_a_warning_on_the_way_and_an_error_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = Batches(full=("out-000001", "out"))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CheckpointError, match="out could not be written"),
    ):
        await batches.train(tmp_path, 3, save_every=1)
    assert batches.saved == {"out-000002": 2}
    assert "out-000001 could not be written: no room. Training continues" in caplog.text


async def test_a_signal_stops_after_its_update_with_its_weights_and_its_exit_status(
    tmp_path: Path,
) -> None:
    batches = Batches(at={2: signal.SIGTERM})
    status = await batches.train(tmp_path, 1000)
    assert status == 128 + signal.SIGTERM
    assert batches.saved == {f"out-{batches.num_learnt:06d}": batches.num_learnt}
    assert 2 <= batches.num_learnt < 1000


async def test_data_that_cannot_be_read_cost_no_weights(tmp_path: Path) -> None:
    batches = Batches(at={3: DataError("frame 7 is damaged")})
    with pytest.raises(DataError, match="frame 7") as caught:
        await batches.train(tmp_path, 5)
    assert batches.saved == {"out-000002": 2}
    (note,) = caught.value.__notes__
    assert note == f"the weights after 2 updates were saved in {tmp_path / 'out-000002'}"
