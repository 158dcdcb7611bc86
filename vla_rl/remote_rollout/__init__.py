"""Episodes of a run on other hosts.

messages        between the control process and a rollout host
agent_recipe    an agent by name, with plain arguments
flat_weights    a policy's trained weights as one row of bytes, and back
origins         where a version comes from: the control process, or the learner's ranks
spreading       its way to several hosts, as delivery_plan says; neighbours: from one host to the next
share_taker     its way from the ranks to a host
weight_shelf    versions in a host's memory
rollout_host    the actor on a host: simulators, engines, agent
starting        that actor started by recipe and files, or taken over
publishing      the newest weights to every host: all stage them, then all apply them
picture_needs   which way pictures go: to the learner's ranks directly, or through this process
picture_routes  that way: depots, shelves beside the ranks, and the connections between them
host_rollout    which hosts run episodes now: brought up, dropped, brought up again
"""
