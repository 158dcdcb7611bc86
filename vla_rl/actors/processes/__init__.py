"""Processes of actors on this host: their start, their program, their end.

channels               a caller's connection to an actor in this loop or in a child process
child                  the program of an actor's own process
started_process        a child as its channel sees it
fork_servers           what is prepared before the first child
fork_server            the program of a fork server
fork_server_process    a fork server as its runtime sees it
liveness               which processes are frozen
"""
