"""Episodes of a run on other hosts.

host_fleet          which hosts run episodes now: brought up, dropped, brought up again
host_control        one of them, as the control process sees it
rollout_host        the actor there: simulators, engines, agent
host_recipe         what it gets of a run
weight_publication  the newest weights to every host: all stage them, then all apply them
weight_sources      where a version comes from: the control process, or the learner's ranks
chain_broadcast     its way to several hosts
weight_links        its way into a host's memory; weight_store: versions there; flat_weights: as bytes
image_routes        the way of images to the learner's ranks, past the control process
image_cache         images beside the ranks; image_links: on their way
"""
