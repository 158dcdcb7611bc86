"""A fault campaign: toy runs, checkpoints, sockets and sandboxes under random faults, with their
invariants checked.

    python -m benchmarks.faults --minutes 30 --seed 7
    python -m benchmarks.faults --rounds 1 --kinds killed_simulators damaged_checkpoints

Every try draws its faults from the seed, runs in a folder of its own, and ends with the same
checks: every update has exactly one metrics line, every episode is accounted for, and no process,
descriptor, shared memory or temporary folder is left. A try that fails prints its findings and keeps its folder.

Keys of the last line:
    tries                tries that were made
    failures             tries with at least one violated promise; goal 0
    lost_episodes        episodes that were dispatched and are accounted for nowhere; goal 0
    lost_metric_lines    updates without exactly one line in metrics.jsonl; goal 0
    left_behind          processes, descriptors, shared memory and temporary folders that outlived a
                         try; goal 0
    skipped              kinds of faults that this machine does not allow, with the reason
    by_kind              {kind: {"tries": ..., "failures": ...}}
"""
