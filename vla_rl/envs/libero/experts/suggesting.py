"""The environments `vla_rl/<suite>-expert-v0`, which suggest the expert's action."""

from typing import Any

from vla_rl.envs.libero.env import LiberoEnv
from vla_rl.envs.libero.experts.expert import Expert
from vla_rl.envs.suggestions import ExpertSuggestions


def make_suggesting_env(**kwargs: Any) -> ExpertSuggestions:
    """Make an environment `vla_rl/<suite>-expert-v0`.

    Keywords are those of `LiberoEnv`. gymnasium's entry point.
    """
    env = LiberoEnv(**kwargs)
    return ExpertSuggestions(env, Expert(env.scene))
