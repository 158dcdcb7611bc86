"""The first minutes on a GPU: stages, each in a process of its own, the most valuable first.

    python -m benchmarks.gpu --out DIR ─► runner ─► process of a stage ─► DIR/NAME.json ─► campaign.json, campaign.md

`stages` is the list; importing it and `runner` imports no torch.
"""
