"""The LeRobotDataset layout: v3.0 and v2.1 are read, v3.0 is written.

Only pyarrow is needed, not the lerobot package.
"""

from vla_rl.datasets.lerobot.layout import INFO_FILE as INFO_FILE
from vla_rl.datasets.lerobot.reading import read_lerobot as read_lerobot
from vla_rl.datasets.lerobot.writing import (
    LeRobotWriter as LeRobotWriter,
    check_can_add as check_can_add,
)
