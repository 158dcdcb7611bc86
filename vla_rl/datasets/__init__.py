"""Data sets of robot episodes: three layouts to read, one to write. No torch.

In memory they have one representation.

    LIBERO's HDF5 ──┐
    LeRobotDataset ─┼─► open_dataset ─► RecordedEpisode ─► compute_statistics, imitation
    our own .npz  ──┘                        │
                       any run's episodes ───┴─► LeRobotWriter ─► LeRobotDataset v3.0

Frames stay on disk, in their encoding, until one is read.
"""

from vla_rl.datasets.episode import RecordedEpisode, compute_statistics
from vla_rl.datasets.hdf5 import read_hdf5
from vla_rl.datasets.lerobot import LeRobotWriter, read_lerobot
from vla_rl.datasets.opening import DatasetOptions, open_dataset, read_recording

__all__ = [
    "DatasetOptions",
    "LeRobotWriter",
    "RecordedEpisode",
    "compute_statistics",
    "open_dataset",
    "read_hdf5",
    "read_lerobot",
    "read_recording",
]
