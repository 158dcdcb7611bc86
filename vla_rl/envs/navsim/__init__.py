"""NavSim's recorded scenes as environments of one decision.

export_scenes.py     runs in a navsim install and writes scenes to plain .npz files; `vla-rl export navsim`
vla_rl/navsim-v0     runs such a folder; needs no navsim
"""
