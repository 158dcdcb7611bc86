"""The report of a run, one page: training writes it at its end,
`python -m vla_rl.cli.report RUN` writes it again.

config, versions, about ─┐
metrics.jsonl ───────────┼─► charts.py (SVG) ─► page.py + page.html.jinja ─► report.html, which needs no other file
held_out.jsonl, strips/ ─┘
"""

from vla_rl.cli.report.page import write_report

__all__ = ["write_report"]
