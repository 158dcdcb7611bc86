"""vla_rl: an asyncio-first actor runtime that post-trains robot policies and language agents by reinforcement."""

from vla_rl import torchvision_operators

__version__ = "0.1.0"

torchvision_operators.install()
