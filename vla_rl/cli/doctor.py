"""Print what would go wrong on this machine: `vla-rl doctor [--checkpoint FOLDER]`.

Each finding says what it is, why it matters and what to do. The exit status is 1 if one of them is
an error, else 0.
"""

import os
import sys
import threading
import time

import tyro

from vla_rl.cli.command_help import option_registry
from vla_rl.cli.doctor import THREADS, Patient, examine
from vla_rl.errors import ConfigError
from vla_rl.run.terminal import lasting_output


@lasting_output()
def main() -> int:
    """Make every check and print the findings; return the exit status."""
    try:
        patient = tyro.cli(Patient, description=__doc__, registry=option_registry())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    num_errors = 0
    for name, findings in examine(patient).items():
        print(f"{name}: in order" if not findings else f"{name}:")
        for each in findings:
            num_errors += each.severity == "error"
            print(f"  {each.severity}: {each.what}.\n    {each.why}.\n    {each.remedy}.")
    print(f"{num_errors} errors, {time.perf_counter() - began:.1f} s", flush=True)
    status = 1 if num_errors else 0
    if any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
        os._exit(status)  # a check that loads a policy or hangs in a library cannot be ended
    return status
