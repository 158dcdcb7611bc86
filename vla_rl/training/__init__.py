"""A training run: its parts, teams, agents, directory, signals and faults, for any pipeline.

run            `train`: the whole run; `TrainingRun`: one that is built and not started
parts          what pipelines are made of, put together from a configuration
team           one policy or several, with their engines and learners
pools          simulators and text environments
saving         checkpoints and metrics, in the order in which they reach the disk; resuming: going on from them
stopping       signals; chaos: faults on purpose
supervised     runs that learn from demonstrations instead
"""
