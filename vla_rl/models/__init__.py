"""Policies, one folder or file for each family.

Each has a configuration, a network, a checkpoint format, and one policy class.
"""
