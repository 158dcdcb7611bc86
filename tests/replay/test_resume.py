"""A replay buffer goes on from a checkpoint as if it had not stopped; no row is lost or doubled by kills, full
disks, damage."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from disks import SmallDisk, tmpfs
from episode_rows import LAYOUT, make_episode_rows

from vla_rl.errors import DataError
from vla_rl.replay import ReplayBuffer, ReplayConfig, ReplayState
from vla_rl.replay.segments import list_segments

TAKE_OVER = ReplayConfig(newer="take_over")


def through_a_file(state: ReplayState) -> ReplayState:
    """Return a state as a checkpoint stores it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ReplayState)


def sampled_episodes(buffer: ReplayBuffer) -> set[int]:
    return set(buffer.sample(seed=1, update=0, batch=2000)["episode"].tolist())


def names(folder: Path) -> list[str]:
    return [path.name for path in list_segments(folder)]


def test_a_restored_buffer_samples_the_same_rows_to_the_byte(tmp_path: Path) -> None:
    config = ReplayConfig(capacity=30, min_success_rows=6)
    strata = {"successes": 0.25, "failures": 0.5, "all": 0.25}
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        buffer.append([make_episode_rows(90, is_success=True)], is_demonstration=True, source="d")
        for number in range(14):
            task = "ab"[number % 2]
            buffer.append([make_episode_rows(number, is_success=number % 3 == 0, task=task)])
        state = through_a_file(buffer.state())
        wanted = [
            buffer.sample(seed=3, update=update, batch=64, strata=strata) for update in range(4)
        ]
        tasks = buffer.tasks
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        buffer.restore(state)
        assert buffer.tasks == tasks
        for update in range(4):
            found = buffer.sample(seed=3, update=update, batch=64, strata=strata)
            assert found.tobytes() == wanted[update].tobytes()
        # and it goes on alike: the same segments are dropped next
        assert buffer.state().stored == state.stored


def test_newer_segments_are_removed_with_a_line_and_their_episodes_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        state = buffer.state()
        buffer.append([make_episode_rows(1)])
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.restore(state)
        assert "1 segments of rows are newer than the checkpoint" in caplog.text
        assert (sampled_episodes(buffer), names(tmp_path)) == ({0}, ["segment-00000000.rows"])
        assert buffer.append([make_episode_rows(0), make_episode_rows(1)]) == [1]


def test_newer_segments_can_be_taken_over_and_are_not_stored_twice(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT, TAKE_OVER) as buffer:
        buffer.append([make_episode_rows(0)])
        state = buffer.state()
        buffer.append([make_episode_rows(1)])
    with ReplayBuffer(tmp_path, LAYOUT, TAKE_OVER) as buffer:
        buffer.restore(state)
        assert buffer.append([make_episode_rows(1), make_episode_rows(2)]) == [2]
        assert sampled_episodes(buffer) == {0, 1, 2}


def test_an_episode_that_capacity_dropped_is_known_after_a_resume(tmp_path: Path) -> None:
    config = ReplayConfig(capacity=3)
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        buffer.append([make_episode_rows(0)])
        buffer.append([make_episode_rows(1)])
        state = buffer.state()
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        buffer.restore(state)
        assert buffer.append([make_episode_rows(0)]) == []


def test_segments_that_a_checkpoint_names_stay_on_the_disk(tmp_path: Path) -> None:
    config = ReplayConfig(capacity=3)
    needed = set[int]()
    with ReplayBuffer(tmp_path, LAYOUT, config, find_needed=lambda: needed) as buffer:
        buffer.append([make_episode_rows(0)])
        old = buffer.state()
        needed.add(0)  # its checkpoint is on the disk
        for number in range(1, 6):
            buffer.append([make_episode_rows(number)])
            buffer.state()
        # of the last two states, and of the checkpoint
        assert names(tmp_path) == [f"segment-{number:08d}.rows" for number in (0, 4, 5)]
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        buffer.restore(old)
        assert sampled_episodes(buffer) == {0}


def test_without_word_of_checkpoints_every_segment_that_a_state_named_stays(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(capacity=3)) as buffer:
        for number in range(5):
            buffer.append([make_episode_rows(number)])
            buffer.state()
    assert len(names(tmp_path)) == 5


def test_a_resume_with_less_capacity_drops_the_oldest(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        for number in range(4):
            buffer.append([make_episode_rows(number)])
        state = buffer.state()
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(capacity=6)) as buffer:
        buffer.restore(state)
        assert sampled_episodes(buffer) == {2, 3}


def test_a_new_run_may_load_what_another_one_left_and_counts_its_own_episodes(
    tmp_path: Path,
) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0), make_episode_rows(1)])
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(existing="load")) as buffer:
        buffer.start()
        assert buffer.num_episodes == 2
        # its episode 0 is another one
        assert buffer.append([make_episode_rows(0)]) == [0]
        assert buffer.num_episodes == 3


def test_a_half_written_segment_is_removed(tmp_path: Path) -> None:
    (tmp_path / "segment-00000003.rows.part").write_bytes(b"half")
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.start()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_delays_rows_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(monkeypatch, of="segment-")
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        disk.room = 500
        buffer.append([make_episode_rows(1)])
        buffer.append([make_episode_rows(2)])
        assert names(tmp_path) == ["segment-00000000.rows"]
        assert sampled_episodes(buffer) == {0, 1, 2}
        assert buffer.metrics(5)["replay/waiting_rows"] == 6.0
        disk.room = None
        buffer.append([make_episode_rows(3)])
        assert buffer.metrics(5)["replay/waiting_rows"] == 0.0
        assert len(names(tmp_path)) == 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "No space left" in caplog.messages[0]
    assert "can be written again" in caplog.messages[1]


def test_a_checkpoint_carries_rows_that_found_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, room=500, of="segment-")
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        state = through_a_file(buffer.state())
        wanted = buffer.sample(seed=1, update=0, batch=32)
    assert names(tmp_path) == []
    disk.room = None
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.restore(state)
        assert buffer.sample(seed=1, update=0, batch=32).tobytes() == wanted.tobytes()
        assert len(names(tmp_path)) == 1


@pytest.mark.needs_root
def test_a_real_disk_that_is_full_leaves_no_half_of_a_segment() -> None:
    with tmpfs("64k") as folder, ReplayBuffer(folder, LAYOUT) as buffer:
        for number in range(40):
            buffer.append([make_episode_rows(number, decisions=20)])
        assert buffer.num_episodes == 40
        assert buffer.metrics(5)["replay/waiting_rows"] > 0
        assert not list(folder.glob("*.part"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_row(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 4
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 4
    path.write_bytes(data)


def come_from_the_future(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)


def replace_with_another(path: Path) -> None:
    path.write_bytes((path.parent.parent / "other" / path.name).read_bytes())


DAMAGE = [
    (cut, "has .* bytes, expected .*damaged"),
    (flip_row, "its checksum differs"),
    (flip_header, "the header of .* is not what was written"),
    (come_from_the_future, "has the format 2, expected 1; a newer vla_rl wrote it"),
    (Path.unlink, "is missing, expected the rows that the checkpoint names"),
    (replace_with_another, "has other rows than those that the checkpoint names"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[each[0].__name__ for each in DAMAGE])
def test_a_damaged_segment_is_named_or_dropped_by_configuration(
    tmp_path: Path, damage: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "replay"
    for each, first in ((folder, 0), (tmp_path / "other", 10)):
        with ReplayBuffer(each, LAYOUT) as buffer:
            for number in range(3):
                buffer.append([make_episode_rows(first + number)])
            if each == folder:
                state = buffer.state()
    damage(folder / "segment-00000001.rows")
    with ReplayBuffer(folder, LAYOUT) as buffer, pytest.raises(DataError, match=words) as caught:
        buffer.restore(state)
    assert "segment-00000001.rows" in str(caught.value)
    assert "set damaged = 'drop'" in str(caught.value)
    with ReplayBuffer(folder, LAYOUT, ReplayConfig(damaged="drop")) as buffer:
        buffer.restore(state)
        assert sampled_episodes(buffer) == {0, 2}
    assert "Its rows are dropped" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_digest": "cd" * 32}, "base_digest is 'abab.*', expected 'cdcd"),
        ({"features": 4}, "features is 3, expected 4"),
        ({"horizon": 3}, "horizon is 2, expected 3"),
        ({"kind": "noise"}, "kind is 'residual', expected 'noise'"),
    ],
)
def test_rows_of_another_policy_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        state = buffer.state()
    other = msgspec.structs.replace(LAYOUT, **change)
    for config in (ReplayConfig(existing="load"), ReplayConfig(damaged="drop")):
        with ReplayBuffer(tmp_path, other, config) as buffer, pytest.raises(DataError, match=words):
            buffer.start() if config.existing == "load" else buffer.restore(state)


def test_rows_of_another_task_are_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0, task="toy/1")])
    config = ReplayConfig(existing="load")
    with (
        ReplayBuffer(tmp_path, LAYOUT, config, tasks=["toy/0"]) as buffer,
        pytest.raises(DataError, match=r"task 'toy/1', expected one of \['toy/0'\]"),
    ):
        buffer.start()


def test_ids_survive_as_ranges(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(number) for number in (0, 1, 2, 7, 9, 10)])
        state = buffer.state()
    assert state.stored == {state.run: ((0, 2), (7, 7), (9, 10))}
    assert np.unique([name.num_rows for name in state.segments]).tolist() == [18]


def test_newer_rows_of_another_run_are_not_removed(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        state = buffer.state()
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(existing="load")) as other:
        other.append([make_episode_rows(7)])
    both = names(tmp_path)
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        with pytest.raises(DataError, match=r"another run wrote it; .*newer = 'take_over'"):
            buffer.restore(state)
        assert names(tmp_path) == both
    with ReplayBuffer(tmp_path, LAYOUT, TAKE_OVER) as buffer:
        buffer.restore(state)
        assert sampled_episodes(buffer) == {0, 7}


ROOT = Path(__file__).parents[2]


def test_no_transition_is_lost_or_doubled_and_batches_are_drawn_again_after_kills() -> None:
    command = ["benchmarks.off_policy", "--parts", "faults", "--kills", "20", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"] > 5
    for name in (
        "transitions_lost",
        "transitions_doubled",
        "samples_unequal_after_resume",
        "damage_unnoticed",
    ):
        assert figures[name] == 0, figures
