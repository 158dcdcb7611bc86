"""Experiments, one file each, with their tasks, sizes, learning rates and rewards.

Run one with `python -m` or `vla-rl`.
"""
