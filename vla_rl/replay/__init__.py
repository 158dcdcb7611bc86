"""Rows of every episode that ran, kept for learners that use each of them many times. No torch.

    Trajectory ──► make_rows ──► ReplayBuffer.append ──► segment files (complete or absent)
                                       │
                                       └► rows in memory ──► ReplayBuffer.sample ──► a batch

transitions   `TransitionLayout` and the columns of a row
segments      one file of rows: header, checksums, rows; `segment_folder`: all of a buffer
live_rows     the rows that can be sampled, in memory
sampling      which rows a batch has
buffer        `ReplayBuffer`
"""

from vla_rl.replay.buffer import ReplayBuffer as ReplayBuffer, ReplayState as ReplayState
from vla_rl.replay.config import ReplayConfig as ReplayConfig
from vla_rl.replay.transitions import (
    EpisodeRows as EpisodeRows,
    TransitionLayout as TransitionLayout,
    make_rows as make_rows,
)
