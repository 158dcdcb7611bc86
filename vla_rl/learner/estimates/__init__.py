"""Estimates of an update before it runs: memory of ranks, memory and seconds of a device, traced passes."""
