"""The text tasks that come with vla_rl.

Each is registered as `text/<name>` by `vla_rl.envs.text`.
"""
