"""Makes `tests/algorithms/support` importable: small batches and trajectories that tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
