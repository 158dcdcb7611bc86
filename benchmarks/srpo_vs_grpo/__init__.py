"""SRPO against GRPO: the same start, tasks, held-out starts and budget, paired by seed.

docs/results.md says what is compared and how, as it was written before the first run.
"""
