"""Makes `tests/datasets/support` importable: data sets that were not written by our own code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
