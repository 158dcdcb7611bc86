"""Small policies are those of the tests of vLLM."""

import sys
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parents[1] / "vllm"):
    sys.path.insert(0, str(_folder / "support"))
