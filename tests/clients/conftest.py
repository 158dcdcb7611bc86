"""Tests of real clients, each in an interpreter of its own: `make test-clients` runs them,
`make test` does not.
"""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("VLA_RL_CLIENT") else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent / "support"))
