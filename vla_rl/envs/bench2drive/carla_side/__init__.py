"""Files for the machine with CARLA. They need Python 3.8 and nothing beside its standard library.

Copy the three files into one folder: vla_rl_agent.py, vla_rl_route_server.py, vla_rl_wire.py.
"""
