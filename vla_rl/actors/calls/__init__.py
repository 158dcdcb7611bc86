"""Calls of actors: what a caller sends, what the actor runs.

actor            classes whose methods can be called, the table of these methods
handles          what `spawn` returns; calls to several actors
client           the caller's end of one actor
exchange         its messages, on their way out or back
pending          calls that wait for their answer
deadlines        when a call counts as overdue
server           the actor's end; callers: its owner, and holders of a handle
running_calls    how a call runs there
"""
