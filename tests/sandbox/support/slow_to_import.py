"""A module that takes its time, or never has been imported where `IMPORT_BEGUN` names a file to make."""

import os
import time
from pathlib import Path

if marker := os.environ.get("IMPORT_BEGUN"):
    Path(marker).touch()
    time.sleep(1000.0)
time.sleep(4.0)


def answer() -> int:
    return 42
