"""Versions of the software of a run, so that it can be reproduced."""

import datetime
import functools
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def versions() -> dict[str, Any]:
    """Return Python, packages, commit, platform, command and time, as values for JSON."""
    return {
        "started_at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": sys.version,
        "platform": platform.platform(),
        "host": platform.node(),
        "commit": git_commit(Path(__file__).parent),
        "packages": _packages(),
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit of the git checkout around `folder`, with `-dirty` if files differ from it.

    None outside of one.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10.0,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _packages() -> dict[str, str]:
    # Reading 150 descriptions takes 0.2 s, and a later run of this process has the same ones loaded.
    found = (package.metadata for package in importlib.metadata.distributions())
    return dict(sorted((about["Name"], about["Version"]) for about in found if "Name" in about))
