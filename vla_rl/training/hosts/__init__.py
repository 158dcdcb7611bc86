"""Episodes of a run on other hosts.

messages        between the control process and a rollout host
flat_weights    a policy's trained weights as one row of bytes, and back
rollout_host    the actor on a host: simulators, engine, agent
publishing      the newest weights to every host: all stage them, then all apply them
host_rollout    which hosts run episodes now: brought up, dropped, brought up again
"""
