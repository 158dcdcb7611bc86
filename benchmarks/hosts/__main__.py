"""Numbers of runs on many hosts: `python -m benchmarks.hosts`, or some of them: `--simulate --wire`.

Each part is a program of this package, such as `python -m benchmarks.hosts.simulate`, whose last line
is JSON with its keys, and with `reason` if it could not measure one. The last line here has all keys:
null for a number that was not measured, and under `reasons` why not.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.interleaved import print_json_line

PARTS: Mapping[str, tuple[str, ...]] = {
    "simulate": ("efficiency_8", "efficiency_64", "efficiency_512"),
    "scaling": ("scaling_8", "control_bytes_per_episode"),
    "images": ("control_bytes_past", "control_bytes_through"),
    "wire": ("wire_cpu_vs_bare_curve", "wire_vs_ray"),
    "coming_and_going": ("join_to_playing_s", "loss_to_replay_s"),
    "publication": ("publish_4_hosts_vs_1",),
    "ranks_to_hosts": (
        "ranks_to_hosts_copies_through_control",
        "ranks_to_hosts_control_peak_mb",
        "slow_host_waited_share",
    ),
}
"""Numbers of each part, whose module has its name."""


def main() -> int:
    """Measure all parts, or those that are chosen; print the figures as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part, keys in PARTS.items():
        parser.add_argument(
            f"--{part.replace('_', '-')}", action="store_true", help=f"measure {', '.join(keys)}"
        )
    asked = parser.parse_args()
    chosen = [part for part in PARTS if getattr(asked, part)] or list(PARTS)
    print_json_line(figures_of(chosen))
    return 0


def figures_of(chosen: list[str]) -> dict[str, object]:
    """Return a figure or None for each key, and under `reasons` why it is None."""
    figures: dict[str, object] = {}
    reasons: dict[str, str] = {}
    for part, keys in PARTS.items():
        reason, measured = _measured(part, is_chosen=part in chosen)
        for key in keys:
            figures[key] = measured.get(key)
            if figures[key] is None:
                reasons[key] = reason
    return {**figures, "reasons": reasons}


def _measured(part: str, *, is_chosen: bool) -> tuple[str, Mapping[str, object]]:
    """Return the figures of a part, and why one of them is missing."""
    name = f"benchmarks.hosts.{part}"
    if not is_chosen:
        return f"not asked for: --{part.replace('_', '-')}", {}
    if importlib.util.find_spec(name) is None:
        return f"{name} does not exist yet", {}
    # a process of its own: namespaces, loops and threads of one part do not disturb the next
    program = subprocess.run(
        [sys.executable, "-m", name], stdout=subprocess.PIPE, text=True, check=False
    )
    print(program.stdout, end="", flush=True)
    try:
        figures: dict[str, object] = json.loads(program.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"{name} ended with status {program.returncode} and no figures", {}
    return str(figures.get("reason", f"{name} did not measure it")), figures


if __name__ == "__main__":
    sys.exit(main())
