"""Makes `tests/algorithms/srpo/support` importable: trajectories made of given observations."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
