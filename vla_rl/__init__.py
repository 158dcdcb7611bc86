"""vla_rl: an asyncio-first actor runtime that post-trains robot policies and language agents by reinforcement."""

__version__ = "0.1.0"
