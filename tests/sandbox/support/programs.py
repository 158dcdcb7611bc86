"""Small programs that a test runs aside: a process that forks as a call runner does has no threads, and
a test has some.
"""

import subprocess
import sys


def said_by(program: str, *arguments: object) -> str:
    """Run a program, and return what it prints; if it fails, the test fails."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
