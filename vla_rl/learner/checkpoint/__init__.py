"""Checkpoints of a run: the state they hold, their files, the names of their folders."""
