"""Two language agents learn to solve sums together: `python -m vla_rl.recipes.grpo_pair --policy pair_base`.

A solver proposes, a checker accepts or sends it back; both have a calculator. Each is compared with itself in the episodes
of its group, and is credited with what it earned. One set of weights may play both, or each has weights of its own, which
learn in every update or take turns:

    --agents.weights shared                                      one policy
    --agents.weights own                                         two policies, both learn in every update
    --agents.weights own --agents.turns alternating              two policies, one learns while the other stands still
    --pipeline ppo --advantage.name marft_gae                    MARFT's advantages, with a critic for each policy

`sft_text --task arithmetic_pair --num-operators 1 --num-digits 1 --out pair_base` makes the base.
"""

import sys
from functools import partial
from typing import Literal

from vla_rl.engines import CriticConfig, EngineConfig, LearnerConfig, OptimizerConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.models.language import CausalLanguageModel
from vla_rl.recipes.command_line import Command, TrainingLaunch, run_recipe
from vla_rl.recipes.evaluation.validation import Validation
from vla_rl.recipes.launching import launch
from vla_rl.recipes.plan import EpisodeFootprint
from vla_rl.recipes.team import Member, RunModel, Team
from vla_rl.recipes.training_config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import Config, EnvSpec, Sampling, derive_seed

ENV_ID = "text/arithmetic_pair"
AGENTS = ("solver", "checker")


class AgentsConfig(Config, frozen=True, kw_only=True):
    """Whose weights the agents of an environment play with, and when they learn."""

    weights: Literal["shared", "own"] = "shared"
    """shared: one policy plays all agents and learns from all of them; own: a policy for each."""

    turns: Literal["joint", "alternating"] = "joint"
    """joint: all policies learn in every update; alternating: one learns while the others stand still."""

    updates_per_turn: int = 2
    """Where they alternate: updates before the next one's turn."""

    def __post_init__(self) -> None:
        self.require(self.updates_per_turn >= 1, "updates_per_turn", "at least 1 update")
        is_possible = self.weights == "own" or self.turns == "joint"
        self.require(is_possible, "turns", "'joint' where one policy plays all agents; set weights to 'own'")


class GrpoPairConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a solver and a checker."""

    run: RunConfig = RunConfig(name="grpo_pair", updates=30, checkpoint_every=15)
    agents: AgentsConfig = AgentsConfig()
    group_size: int = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    text: TextPoolConfig = TextPoolConfig(num_envs=64)
    chat: ChatLimits = ChatLimits(max_turns=16, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=128, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2), micro_batch=128, micro_batch_tokens=8192
    )
    critic: CriticConfig = CriticConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), micro_batch_tokens=8192, epochs=2
    )

    policy: str = "pair_base"
    """Folder of the checkpoint to start from, such as `sft_text --task arithmetic_pair` leaves, or its id on the hub."""

    checker_policy: str | None = None
    """With weights of their own: another one for the checker; none starts both from `policy`."""

    num_operators: int = 1
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of its numbers."""

    num_rounds: int = 2
    """Proposals that the solver has."""

    credit: Literal["team", "own"] = "own"
    """team: both earn 1 for a right proposal that was accepted; own: the solver earns 1 for a right last proposal, the
    checker a share of 1 for each right verdict."""

    num_starts: int = 4096
    """Different sums to train on."""

    num_validation: int = 64
    """Other sums that are played before the first update and after the last; 0 for none."""

    num_tries: int = 4
    """At each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_starts", "num_tries"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.num_validation >= 0, "num_validation", "at least 0")
        has_place = self.checker_policy is None or self.agents.weights == "own"
        self.require(has_place, "checker_policy", "none where one policy plays all agents; set agents.weights to 'own'")


def starts_of(config: GrpoPairConfig, kind: str, num: int) -> list[TaskStart]:
    """Sums of one kind, `train` or `validation`, each drawn from seeds of its own."""
    kwargs = {
        "num_operators": config.num_operators,
        "num_digits": config.num_digits,
        "num_rounds": config.num_rounds,
        "credit": config.credit,
    }
    env = EnvSpec(id=ENV_ID, kwargs=kwargs)
    return [
        TaskStart(env=env, task=ENV_ID, seed=derive_seed(config.run.seed, kind, number) % 2**31)
        for number in range(num)
    ]


def policies_of(config: GrpoPairConfig) -> RunModel | Team:
    """One policy for both agents, or one for each."""
    if config.agents.weights == "shared":
        return CausalLanguageModel.load(config.policy)
    folders = (config.policy, config.checker_policy or config.policy)
    members = {agent: Member(CausalLanguageModel.load(folder)) for agent, folder in zip(AGENTS, folders, strict=True)}
    return Team(members, config.agents.updates_per_turn if config.agents.turns == "alternating" else None)


def validation_of(config: GrpoPairConfig) -> Validation | None:
    """What the run is judged by; a success is a right proposal that was accepted."""
    if config.num_validation == 0:
        return None
    starts = starts_of(config, "validation", config.num_validation)
    agent = partial(chat_agent, limits=config.chat)
    return Validation(starts, config.num_tries, agent, Sampling(temperature=config.temperature))


async def main(command: Command[TrainingLaunch, GrpoPairConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    footprint = EpisodeFootprint(
        what_runs=ENV_ID, simulator_mb=0, server_mb=0, chunk_bytes=4096, num_chunks=config.chat.max_turns
    )
    starts = starts_of(config, "train", config.num_starts)
    return await launch(command, starts, policies_of(config), footprint, judge=validation_of(config))


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, GrpoPairConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
