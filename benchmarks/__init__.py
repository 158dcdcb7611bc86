"""Benchmarks; each measures a ratio of vla_rl to a peer or to the machine's limit, and prints a
JSON object as last line.
"""
