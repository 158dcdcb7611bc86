"""Appends and samples of a replay buffer, against plain files and one NumPy array of the same bytes."""

import os
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.interleaved import medians_of, ratio_of, sample_in_turn
from vla_rl.replay import EpisodeRows, ReplayBuffer, ReplayConfig, TransitionLayout
from vla_rl.replay.transitions import set_episode_columns

LAYOUT: Final = TransitionLayout(
    features=2048,
    proprio=8,
    action=56,
    horizon=8,
    action_dim=7,
    kind="residual",
    base_digest="0" * 64,
)
"""Sizes of pi0.5; a row has 17 KB."""

EPISODES, DECISIONS = 32, 12
BATCH, BATCHES = 256, 40
STORED_ROWS: Final = 20_000


def make_episodes(first: int, episodes: int) -> list[EpisodeRows]:
    """Return episodes of random features, none of them a success."""
    numbers = np.random.default_rng(first)
    made = []
    for number in range(first, first + episodes):
        rows = LAYOUT.make_empty_rows(DECISIONS)
        for key in ("features", "next_features"):
            rows[key] = numbers.random(rows[key].shape, np.float32)
        rows["num_rewards"] = LAYOUT.horizon
        set_episode_columns(rows, episode_id=number, is_success=False, is_cut_off=True)
        made.append(EpisodeRows(episode_id=number, task="task/0", rows=rows))
    return made


def measure_appends(folder: Path, rounds: int) -> dict[str, float]:
    """Return MB/s of an append of 32 episodes of 12 decisions, and its ratio to a plain file."""
    folder.mkdir(parents=True)
    num_bytes = EPISODES * DECISIONS * LAYOUT.row_dtype.itemsize
    count = 0
    with ReplayBuffer(folder / "replay", LAYOUT) as buffer:

        def append() -> float:
            nonlocal count
            count += 1
            episodes = make_episodes(count * EPISODES, EPISODES)
            started = time.perf_counter()
            buffer.append(episodes)
            return num_bytes / 1e6 / (time.perf_counter() - started)

        def write_plain() -> float:
            data = np.random.default_rng(count).bytes(num_bytes)
            started = time.perf_counter()
            with (folder / f"plain-{count}").open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
            return num_bytes / 1e6 / (time.perf_counter() - started)

        samples = sample_in_turn({"append": append, "plain": write_plain}, rounds)
    return {
        "append_mb_per_s": round(medians_of(samples)["append"], 1),
        "append_mb_per_s_vs_plain_write": round(ratio_of(samples, "append", "plain"), 3),
    }


def measure_samples(folder: Path, rounds: int) -> dict[str, float]:
    """Return rows per CPU second of batches of 256, and their ratio to `numpy.take` on one array."""
    row_bytes = LAYOUT.row_dtype.itemsize
    with ReplayBuffer(folder, LAYOUT, ReplayConfig(capacity=STORED_ROWS)) as buffer:
        first = 0
        while buffer.num_rows + EPISODES * DECISIONS <= STORED_ROWS:
            buffer.append(make_episodes(first, EPISODES))
            first += EPISODES
        array = np.random.default_rng(0).integers(
            0, 255, (buffer.num_rows, row_bytes), np.uint8, endpoint=True
        )
        update = 0

        def sample() -> float:
            nonlocal update
            started = time.process_time()
            for _ in range(BATCHES):
                update += 1
                buffer.sample(seed=1, update=update, batch=BATCH)
            return BATCH * BATCHES / (time.process_time() - started)

        def take() -> float:
            indices = [
                np.random.default_rng(number).integers(0, len(array), BATCH)
                for number in range(BATCHES)
            ]
            started = time.process_time()
            for each in indices:
                np.take(array, each, axis=0)
            return BATCH * BATCHES / (time.process_time() - started)

        samples = sample_in_turn({"sample": sample, "take": take}, rounds)
    return {
        "sample_rows_per_s": round(medians_of(samples)["sample"]),
        "sample_rows_per_s_vs_numpy_take": round(ratio_of(samples, "sample", "take"), 3),
    }
