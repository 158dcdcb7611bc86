"""The process of one stage, which ends with the campaign however that ends.

python -m benchmarks.gpu.campaign.stage_process NAME DIR PARENT_PID [tiny]
"""

import sys
from pathlib import Path

from vla_rl.util.processes import die_with_parent_only


def main() -> None:
    """Run the stage that the arguments name."""
    name, folder, parent_pid, *size = sys.argv[1:]
    # before torch is imported: a stage that outlives the campaign keeps its GPU memory
    die_with_parent_only(int(parent_pid))
    from benchmarks.gpu.campaign.run_stage import run_stage

    run_stage(name, Path(folder), is_tiny="tiny" in size)


if __name__ == "__main__":
    main()
