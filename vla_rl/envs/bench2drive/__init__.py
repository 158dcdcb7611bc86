"""Bench2Drive: routes of CARLA's leaderboard, driven by a policy on another machine.

carla_side/                files for the machine with CARLA: the agent, and a server of routes; `vla-rl export carla`
vla_rl/bench2drive-v0      one route as an episode, served from there
"""
