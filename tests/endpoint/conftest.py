"""Puts the helper modules of these tests where they can be imported, by child processes too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
