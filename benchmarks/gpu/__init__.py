"""Checks of every line that a GPU runs, without one: see `python -m benchmarks.gpu --help`."""
