"""Nodes of pipelines, for any kind of episodes.

rewards       reward episodes with a function, selected by name or as "module:function"
advantages    subtract penalties from rewards; compute an advantage for each decision
run_parts     collect groups, estimate values, update the policy, save, show
"""
