"""Measurements between hosts, with network namespaces of this machine as the hosts."""
