"""Two language agents learn to solve sums together:
`python -m vla_rl.recipes.grpo_pair --policy pair_base`.

A solver proposes an answer, and a checker accepts it or sends it back; both have a calculator. Each
agent is compared with itself in the other episodes of its group, by its own rewards. Both agents
share one set of weights, or each has its own, and the policies learn in every update or take turns:

    --agents.weights shared                                      one policy
    --agents.weights own                                         two policies, both learn in every update
    --agents.weights own --agents.turns alternating              two policies, one learns while the other is frozen
    --pipeline ppo --advantage.name marft_gae                    MARFT's advantages, with a critic for each policy

`sft_text --task arithmetic_pair --num-operators 1 --num-digits 1 --out pair_base` makes the base
policy.
"""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import vla_rl
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.engines import EngineConfig
from vla_rl.errors import ConfigError
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig, launch_text
from vla_rl.rollout import ChatLimits
from vla_rl.types import Config, EnvSpec, PositiveInt, ReadIf

if TYPE_CHECKING:
    from vla_rl.team.members import Team


ENV_ID = "text/arithmetic_pair"
AGENTS = ("solver", "checker")
BASE = "pair_base"


class AgentsConfig(Config, frozen=True, kw_only=True):
    """The weights that the agents of an environment act with, and when those learn."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("updates_per_turn",), "turns", ("alternating",)),
    )

    weights: Literal["shared", "own"] = "shared"
    """shared: one policy acts for all agents and learns from all of them; own: a policy for
    each."""

    turns: Literal["joint", "alternating"] = "joint"
    """joint: all policies learn in every update; alternating: one learns while the others are
    frozen."""

    updates_per_turn: PositiveInt = 2
    """With alternating turns: updates of one policy before the next one's turn."""

    def __post_init__(self) -> None:
        is_possible = self.weights == "own" or self.turns == "joint"
        self.require(
            is_possible, "turns", "'joint' if one policy acts for all agents; set weights to 'own'"
        )


class GrpoPairConfig(GrpoTextConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a solver and a checker."""

    run: RunConfig = RunConfig(name="grpo_pair", updates=30, checkpoint_every=15)
    agents: AgentsConfig = AgentsConfig()
    chat: ChatLimits = ChatLimits(max_turns=16, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=128, max_reply=32)

    policy: str = BASE
    """Folder (such as `sft_text --task arithmetic_pair` writes) or hub id of the checkpoint to
    start from."""

    checker_policy: str | None = None
    """Checkpoint for the checker, with agents.weights own. None: both agents start from
    `policy`."""

    num_operators: int = 1
    """Operations in a sum."""

    num_rounds: int = 2
    """Maximum number of the solver's proposals."""

    credit: Literal["team", "own"] = "own"
    """team: both earn 1 if a correct proposal was accepted; own: the solver earns 1 if its last
    proposal is correct, and the checker earns a share of 1 for each correct verdict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # one set of weights cannot begin with two checkpoints
        is_allowed = self.checker_policy is None or self.agents.weights == "own"
        self.require(
            is_allowed,
            "checker_policy",
            "none if one policy acts for all agents; set agents.weights to 'own'",
        )

    @property
    def env(self) -> EnvSpec:
        """Specification of the environment."""
        kwargs = {**super().env.kwargs, "num_rounds": self.num_rounds, "credit": self.credit}
        return EnvSpec(id=ENV_ID, kwargs=kwargs)


def load_policies(config: GrpoPairConfig) -> "Team":
    """Load one policy for both agents, or one for each.

    Raises: ConfigError if the default policy was not made yet; CheckpointError.
    """
    if config.policy == BASE and not os.path.exists(BASE):
        raise ConfigError(
            f"policy is {BASE!r}, the default, and there is no such folder; make it by `vla-rl sft_text "
            f"--task arithmetic_pair --num-operators 1 --num-digits 1 --out {BASE}`, or name another"
        )
    if config.agents.weights == "shared":
        return vla_rl.Team.of(language.load_language_model(config.policy))
    # loaded twice even from one folder: each of the two then learns weights of its own
    folders = (config.policy, config.checker_policy or config.policy)
    members = {
        agent: vla_rl.Member(language.load_language_model(folder))
        for agent, folder in zip(AGENTS, folders, strict=True)
    }
    return vla_rl.Team(
        members, config.agents.updates_per_turn if config.agents.turns == "alternating" else None
    )


async def main(command: Command[TrainingLaunch, GrpoPairConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    return await launch_text(command, load_policies(command.config))


cli = partial(run_recipe, TrainingLaunch, GrpoPairConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
