"""A module that never has been imported."""

import os
import time
from pathlib import Path

Path(os.environ["IMPORT_BEGUN"]).touch()
time.sleep(1000.0)
