"""Policies, one folder for each family: configuration, network, processor, checkpoint and policy
class.
"""
