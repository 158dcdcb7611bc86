"""The LeRobotDataset layout: v3.0 and v2.1 are read, v3.0 is written.

Only pyarrow is needed, not the lerobot package.
"""

from vla_rl.datasets.lerobot.layout import INFO_FILE
from vla_rl.datasets.lerobot.reading import read_lerobot
from vla_rl.datasets.lerobot.writing import LeRobotWriter, check_can_add

__all__ = ["INFO_FILE", "LeRobotWriter", "check_can_add", "read_lerobot"]
