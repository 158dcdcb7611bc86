"""The environments `vla_rl/<suite>-expert-v0`, which suggest the expert's action."""

from typing import Any

from vla_rl.envs.libero.env import LiberoEnv
from vla_rl.envs.suggestions import ExpertPolicy, ExpertSuggestions

__all__ = ["ExpertPolicy", "ExpertSuggestions", "make_suggesting_env"]


def make_suggesting_env(**kwargs: Any) -> ExpertSuggestions:
    """Make an environment `vla_rl/<suite>-expert-v0`.

    Keywords are those of `LiberoEnv`. gymnasium's entry point.
    """
    return ExpertSuggestions(LiberoEnv(**kwargs))
