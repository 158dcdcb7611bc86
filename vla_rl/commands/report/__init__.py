"""A run as one page: `python -m vla_rl.commands.report RUN` writes RUN/report.html again; training writes it at its end.

config, versions, about ─┐
metrics.jsonl ───────────┼─► charts.py (SVG) ─► page.py + page.html.jinja ─► report.html, which needs no other file
held_out.jsonl, strips/ ─┘
"""

from vla_rl.commands.report.page import write_report

__all__ = ["write_report"]
