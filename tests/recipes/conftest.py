"""Makes `tests/recipes/support` importable: runs small enough for a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
