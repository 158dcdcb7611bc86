"""Folder for the PYTHONPATH of engine processes.

Python itself imports `sitecustomize` from it at the start.
"""
