"""One file an experiment: its tasks, sizes, learning rate and reward in sight. Run one with `python -m`, or `vla-rl`."""
