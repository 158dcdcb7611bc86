"""Data sets of robot episodes: three layouts to read, one to write. No torch.

In memory they have one representation.

    LIBERO's HDF5 ──┐
    LeRobotDataset ─┼─► open_dataset ─► RecordedEpisode ─► statistics_of, imitation
    our own .npz  ──┘                        │
                       any run's episodes ───┴─► LeRobotWriter ─► LeRobotDataset v3.0

Frames stay on disk, in their encoding, until one is read.
"""

from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.datasets.hdf5 import read_hdf5
from vla_rl.datasets.lerobot import LeRobotWriter, read_lerobot
from vla_rl.datasets.opening import DatasetOptions, open_dataset
from vla_rl.datasets.recordings import read_recording
from vla_rl.datasets.statistics import statistics_of

__all__ = [
    "DatasetOptions",
    "LeRobotWriter",
    "RecordedEpisode",
    "open_dataset",
    "read_hdf5",
    "read_lerobot",
    "read_recording",
    "statistics_of",
]
