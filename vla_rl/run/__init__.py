"""A training run: its parts, its files, its end.

train                  `train`: the whole run, from the beginning or an earlier one
training_run           `TrainingRun`: a run that is built and not started
parts                  the parts of pipelines, made from a configuration; hosts: other hosts' parts
estimates              memory and time of an update, before anything is allocated
saving                 checkpoints and metrics, in the order in which they reach the disk
resuming               a resume from them, also after ranks of the learner died
background_evaluation  evaluates held-out starts while the run trains on
terminal               signals, output that never fails, reports of errors
supervised             runs that learn from demonstrations instead; imitation: with which samples
recording              episodes into a data set
"""
