"""Makes `tests/models/support` importable: checkpoints in the public layout, small."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "support"))
