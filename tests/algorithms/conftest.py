"""Makes `tests/algorithms/support` importable: small batches that the tests of losses share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
