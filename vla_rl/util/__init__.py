"""Helpers that several rooms share; this room imports nothing of vla_rl but `errors`."""
