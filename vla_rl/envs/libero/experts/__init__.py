"""Scripted experts for LIBERO: they read the hidden state, and solve tasks with programs of a few
motions.

    env = LiberoEnv("libero_goal", task_id=3, physics="fast")
    env.reset(options={"init_state_id": 0})
    expert = Expert(env.scene)
    env.step(expert.act())

`ExpertSuggestions` and `ExpertPolicy` turn the expert into a policy, for environments in other
processes.
"""

from vla_rl.envs.libero.experts.expert import Expert as Expert
