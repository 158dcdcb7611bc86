"""A training run: its parts, teams, agents, directory, signals and faults, for any pipeline.

run            `train`: the whole run; `TrainingRun`: a run that is built and not started
parts          the parts of pipelines, made from a configuration
team           one policy or several, with their engines and learners
pools          simulators and text environments
saving         checkpoints and metrics, in the order in which they reach the disk; resuming: resume
               from them
judging        evaluates held-out starts beside training; held_out: whether a run has that
stopping       signals; chaos: deliberate faults
supervised     runs that learn from demonstrations instead; imitators: in one process, or over ranks
"""
