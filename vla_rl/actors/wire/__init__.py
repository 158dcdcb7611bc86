"""The wire of actors: messages, how values become frames, shared memory, sockets.

envelope    what each message begins with, the messages about processes
codec       values to frames, frames to values
slots       arrays in shared memory
sockets     ZeroMQ sockets on a loop
"""
