"""Kills, full disks and damaged segments against a replay buffer.

A forked writer appends episodes, draws a batch after each append, and saves a checkpoint after every third.
It is killed after a random time and goes on from its checkpoint. What it stored and drew reaches the parent
by a pipe, and is compared with a run that nothing disturbed.
"""

import os
import random
import resource
import shutil
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.replay import EpisodeRows, ReplayBuffer, ReplayConfig, ReplayState, TransitionLayout
from vla_rl.replay.segments import list_segments, read_segment
from vla_rl.replay.transitions import set_episode_columns
from vla_rl.util.atomic_files import replace_file

LAYOUT: Final = TransitionLayout(
    features=64,
    proprio=8,
    action=14,
    horizon=2,
    action_dim=7,
    kind="residual",
    base_digest="0" * 64,
)
CONFIG: Final = ReplayConfig(capacity=400, min_success_rows=60)
DECISIONS: Final = 6
EVERY: Final = 3
"""Appends between two checkpoints."""

MOST_LIFE_S: Final = 0.4
SMALL_FILE: Final = 4096
"""Bytes after which a write fails while the disk counts as full."""


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of the writer: the buffer's state, and what comes next."""

    replay: ReplayState | None = None
    step: int = 0
    next_id: int = 0


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One line of the writer: a step, the batch that it drew, and episodes that are on the disk."""

    step: int
    checksum: int
    stored: tuple[int, ...]


def make_episode(number: int) -> EpisodeRows:
    """Return an episode whose rows follow from its number."""
    numbers = np.random.default_rng(number)
    rows = LAYOUT.make_empty_rows(DECISIONS)
    for key in ("features", "next_features", "action", "reference", "next_reference"):
        rows[key] = numbers.normal(size=rows[key].shape)
    rows["num_rewards"] = LAYOUT.horizon
    set_episode_columns(rows, episode_id=number, is_success=number % 3 == 0, is_cut_off=False)
    return EpisodeRows(episode_id=number, task=f"task/{number % 5}", rows=rows)


def take_step(buffer: ReplayBuffer, state: WriterState) -> tuple[WriterState, Report]:
    """Append the episodes of a step, and draw its batch."""
    count = 1 + state.step * 7 % 4
    ids = range(state.next_id, state.next_id + count)
    buffer.append([make_episode(number) for number in ids])
    batch = buffer.sample(seed=5, update=state.step, batch=64)
    is_stored = buffer.metrics(0)["replay/waiting_rows"] == 0
    report = Report(state.step, zlib.crc32(batch.tobytes()), tuple(ids) if is_stored else ())
    return WriterState(step=state.step + 1, next_id=state.next_id + count), report


def write_until_killed(folder: Path, pipe: int, chance: random.Random) -> None:
    """Go on from the checkpoint, for ever; now and then the disk is full for some steps."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    full_until = 0
    saved = folder / "checkpoint"
    state = read_checkpoint(saved)

    def find_needed() -> set[int]:
        newest = read_checkpoint(saved).replay
        return {name.number for name in newest.segments} if newest else set()

    with ReplayBuffer(folder / "replay", LAYOUT, CONFIG, find_needed=find_needed) as buffer:
        restore(buffer, state)
        while True:
            if chance.random() < 0.05:
                full_until = state.step + 4
            room = SMALL_FILE if state.step < full_until else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            state, report = take_step(buffer, state)
            os.write(pipe, msgspec.json.encode(report) + b"\n")
            if state.step % EVERY == 0:
                try:
                    named = msgspec.structs.replace(state, replay=buffer.state())
                    replace_file(saved, msgspec.msgpack.encode(named))
                except OSError:
                    continue  # the disk is full: the older checkpoint stays


def restore(buffer: ReplayBuffer, state: WriterState) -> None:
    """Restore the buffer of a checkpoint; without one, all segments are newer."""
    empty = ReplayState(run="writer", segments=(), next_number=0, tasks=(), stored={})
    buffer.restore(state.replay or empty)


def read_checkpoint(path: Path) -> WriterState:
    """Return the newest checkpoint, or the beginning."""
    if not path.exists():
        return WriterState()
    return msgspec.msgpack.decode(path.read_bytes(), type=WriterState)


def run_life(folder: Path, chance: random.Random) -> list[Report]:
    """Fork a writer, kill it after a random time, and return what it reported."""
    reader, writer = os.pipe()
    seed = chance.random()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            write_until_killed(folder, writer, random.Random(seed))
        except BaseException as error:
            os.write(2, f"the writer failed: {error!r}\n".encode())
        finally:
            os._exit(status)
    os.close(writer)
    time.sleep(chance.random() * MOST_LIFE_S)
    os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the writer ended by itself, expected a kill")
    return [msgspec.json.decode(line, type=Report) for line in lines]


def count_rows(folder: Path, first: int) -> Counter[tuple[int, int]]:
    """Return how often each row is in the whole segments from a number on."""
    found = Counter[tuple[int, int]]()
    for path in list_segments(folder):
        header, _, rows = read_segment(path)
        if header.number >= first:
            found.update(zip(rows["episode"].tolist(), rows["decision"].tolist(), strict=True))
    return found


@contextmanager
def damaged(folder: Path, chance: random.Random) -> Iterator[Path | None]:
    """Damage one segment inside the block, and repair it on leaving."""
    paths = list_segments(folder)
    if not paths:
        yield None
        return
    path = chance.choice(paths)
    data = path.read_bytes()
    spoilt = bytearray(data)
    kind = chance.randrange(4)
    if kind == 0:
        spoilt[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del spoilt[chance.randrange(len(data)) :]
    elif kind == 2:
        spoilt[8] = 99  # of a later format
    path.write_bytes(spoilt) if kind < 3 else path.unlink()
    try:
        yield path
    finally:
        path.write_bytes(data)


def is_damage_noticed(folder: Path, path: Path, state: WriterState) -> bool:
    """Return whether a resume names the damaged segment, if its checkpoint needs it."""
    named = {name.file_name for name in state.replay.segments} if state.replay else set()
    copy = folder / "copy"
    shutil.copytree(folder / "replay", copy)
    try:
        with ReplayBuffer(copy, LAYOUT, CONFIG) as buffer:
            restore(buffer, state)
        return path.name not in named
    except DataError as error:
        return path.name in named and path.name in str(error)
    finally:
        shutil.rmtree(copy)


def run_campaign(folder: Path, kills: int, seed: int) -> dict[str, float]:
    """Kill a writer many times; return what was lost, doubled, or drawn otherwise."""
    chance = random.Random(seed)
    (folder / "replay").mkdir(parents=True)
    drawn = dict[int, int]()
    lost = doubled = unequal = unnoticed = num_damaged = full = 0
    for life in range(kills):
        before = read_checkpoint(folder / "checkpoint")
        reports = run_life(folder, chance)
        after = read_checkpoint(folder / "checkpoint")
        first = after.replay.next_number if after.replay else 0
        found = count_rows(folder / "replay", first)
        stored = [number for each in reports for number in each.stored if number >= after.next_id]
        full += sum(not each.stored for each in reports)
        lost += sum(found[number, row] == 0 for number in stored for row in range(DECISIONS))
        doubled += sum(count - 1 for count in found.values())
        for each in reports:
            unequal += drawn.setdefault(each.step, each.checksum) != each.checksum
        lost += max(before.next_id - after.next_id, 0)
        if life % 4 == 3:
            with damaged(folder / "replay", chance) as path:
                if path is not None:
                    num_damaged += 1
                    unnoticed += not is_damage_noticed(folder, path, after)
    kept, wanted, undisturbed = compare_with_undisturbed(folder, max(drawn, default=0))
    lost += sum((wanted - kept).values())
    doubled += sum((kept - wanted).values())
    unequal += sum(undisturbed[step] != checksum for step, checksum in drawn.items())
    return {
        "transitions_lost": lost,
        "transitions_doubled": doubled,
        "samples_unequal_after_resume": unequal,
        "damage_unnoticed": unnoticed,
        "kills": kills,
        "damaged_segments": num_damaged,
        "steps_without_room": full,
        "steps": len(drawn),
    }


def compare_with_undisturbed(
    folder: Path, last: int
) -> tuple[Counter[bytes], Counter[bytes], dict[int, int]]:
    """Return the rows of the killed writer at its checkpoint, those of a run without kills at the same step,
    and the batches of that run up to the step `last`.
    """
    state, drawn = read_checkpoint(folder / "checkpoint"), dict[int, int]()
    with ReplayBuffer(folder / "replay", LAYOUT, CONFIG) as buffer:
        restore(buffer, state)
        kept = count_live(buffer)
    wanted = Counter[bytes]()
    now = WriterState()
    with ReplayBuffer(folder / "undisturbed", LAYOUT, CONFIG) as buffer:
        buffer.start()
        while now.step <= max(last, state.step):
            if now.step == state.step:
                wanted = count_live(buffer)
            now, report = take_step(buffer, now)
            drawn[report.step] = report.checksum
    return kept, wanted, drawn


def count_live(buffer: ReplayBuffer) -> Counter[bytes]:
    """Return how often each live row is in the files that the buffer names."""
    found = Counter[bytes]()
    for name in buffer.state().segments:
        _, _, rows = read_segment(buffer.folder / name.file_name)
        rows["task"] = 0  # each file counts tasks by itself
        found.update(row.tobytes() for row in rows)
    return found
