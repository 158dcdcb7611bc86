"""Files for the machine with CARLA. They need Python 3.8 and nothing beside its standard library.

Copy the files into one folder: vla_rl_agent.py, vla_rl_route_server.py, vla_rl_wire.py, and
vla_rl_first_junctions.py, which needs CARLA's folder `agents` too.
"""
