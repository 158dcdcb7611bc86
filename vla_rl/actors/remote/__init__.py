"""Actors on other hosts: connections, keys of peers, processes that clients start here.

host_connection    a caller's connection to a host server
direct_link        the encrypted connection to one process there
peer_sockets       a listening socket for one peer of another process, and the way to it
shared_handles     handles that were sent to another actor
hosted_clients     what a host server holds for its clients
"""
