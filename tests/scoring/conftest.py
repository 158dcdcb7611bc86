"""Puts the scorers that tests of text environments share where they can be imported, by child
processes too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "envs" / "support"))
