"""Data sets of robot episodes: four layouts to read, one to write. No torch.

In memory they have one representation.

    LIBERO's HDF5 ──┐
    RLDS          ──┤
    LeRobotDataset ─┼─► open_dataset ─► RecordedEpisode ─► compute_statistics, imitation
    our own .npz  ──┘                        │
                       any run's episodes ───┴─► LeRobotWriter ─► LeRobotDataset v3.0

Frames stay on disk, in their encoding, until one is read.
"""

from vla_rl.datasets.episode import (
    RecordedEpisode as RecordedEpisode,
    compute_statistics as compute_statistics,
)
from vla_rl.datasets.hdf5 import read_hdf5 as read_hdf5
from vla_rl.datasets.lerobot import LeRobotWriter as LeRobotWriter, read_lerobot as read_lerobot
from vla_rl.datasets.opening import (
    DatasetOptions as DatasetOptions,
    open_dataset as open_dataset,
    read_recording as read_recording,
)
from vla_rl.datasets.rlds import read_rlds as read_rlds
