"""The learners of a team, with the critics and reference policies that its pipeline asks for.

in this process       `Learner`
in several ranks      `ShardedLearner`, which has the critic and the reference in its ranks too
of a head             `OffPolicyLearner`, from a replay buffer
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.learner import (
    Critic,
    CriticConfig,
    CriticTeam,
    Learner,
    LearnerConfig,
    LearnerTeam,
    PolicyCritic,
    PolicyReference,
    Reference,
    ReferenceTeam,
)
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.estimates.rank_memory import measure_policy, rank_memory
from vla_rl.learner.team import MemberLearner
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.registry import learns_from_buffer
from vla_rl.rollout.engines import LaggingEngine
from vla_rl.team.members import RunEngines, Team
from vla_rl.types import derive_seed

if TYPE_CHECKING:
    from vla_rl.learner.distributed import ShardedLearner


SettingsT = TypeVar("SettingsT", LearnerConfig, CriticConfig)


def make_learners(
    config: LearningConfig,
    team: Team,
    lane: DeviceLane,
    engines: RunEngines | None,
    weight_version: int,
    runtime: Runtime,
    *,
    others: Mapping[str, WeightSink] = MappingProxyType({}),
    lost_gpus: Collection[int] = (),
) -> LearnerTeam:
    """Make the learners of a run; each publishes to its policy's engine, and to one of `others`.

    Args: `engines`, those of this host, if it has some; `others`, receivers by member name.

    Raises: ConfigError if several ranks cannot train a policy, or if policies of a team have
        different numbers of ranks.
    """
    if learns_from_buffer(config.pipeline):
        # imported here, because other runs do without replay buffers and heads
        from vla_rl.team.heads import make_head_learner

        return make_head_learner(config, team, lane, engines, weight_version, others)
    learners: dict[str, MemberLearner] = {}
    each = {
        name: _over_run(config, member.learner or config.learner)
        for name, member in team.members.items()
    }
    num_ranks = max(settings.ranks for settings in each.values())
    # Ranks of all policies share the same devices, so each learner is told what the others take.
    rank_bytes = {
        name: rank_memory(measure_policy(member.model, each[name]), each[name]).total
        for name, member in team.members.items()
    }
    for name, member in team.members.items():
        settings = each[name]
        sinks: list[WeightSink] = [] if engines is None else [engines.owned[name]]
        if name in others:
            sinks.append(others[name])
        config.cluster.require(
            settings.ranks > 1 or not config.cluster.learners,
            "learners",
            "none with learner.ranks = 1, which learns in this process",
        )
        settings.require(
            settings.ranks == num_ranks, "ranks", f"{num_ranks}, as for the other policies"
        )
        if settings.ranks > 1:
            # imported here, because one process pays nothing for what several need
            from vla_rl.learner.distributed import ShardedLearner

            learners[name] = ShardedLearner(
                member.model,
                runtime,
                lane,
                settings,
                sinks,
                weight_version=weight_version,
                member="" if team.agent_names.acts_for_all else name,
                other_bytes=sum(rank_bytes.values()) - rank_bytes[name],
                lost_gpus=lost_gpus,
                are_assigned=bool(config.cluster.learners),
            )
            # with hosts, their publication says which version all serve, those of this process included
            engine = None if engines is None or name in others else engines.owned[name]
            if isinstance(engine, LaggingEngine):
                engine.apply_in_background()
        else:
            learners[name] = Learner(
                member.model, lane, settings, publish_to=sinks, weight_version=weight_version
            )
    return LearnerTeam(learners, team.updates_per_turn, team.learning)


def _over_run(config: LearningConfig, settings: SettingsT) -> SettingsT:
    """Return the settings with the number of the run's optimizer steps, where its end is meant."""
    # A learning rate that decays over the run needs the number of its last step, and an update makes as
    # many steps as its episodes have mini-batches.
    episodes = config.scheduler.groups_per_update * config.group_size
    of_update = settings.epochs * -(-episodes // (settings.minibatch_trajectories or episodes))
    optimizer = settings.optimizer.over_run(config.run.updates * of_update)
    return msgspec.structs.replace(settings, optimizer=optimizer)


def make_critics(
    config: LearningConfig, team: Team, lane: DeviceLane, learners: LearnerTeam
) -> CriticTeam:
    """Make the critics of a run; the ranks of a sharded learner compute its policy's critic."""
    critics: dict[str, PolicyCritic] = {}
    settings = _over_run(config, config.critic)
    for name, member in team.members.items():
        # By the agent's name, so that the critics of a team do not begin with equal weights.
        seed = team.agent_names.derive_seed(derive_seed(config.run.seed, "critic"), name)
        sharded = _as_sharded(learners.member(name), member.learner or config.learner)
        critics[name] = (
            Critic(member.model, lane, settings, seed)
            if sharded is None
            else sharded.critic(settings, seed)
        )
    return CriticTeam(critics)


def make_references(
    config: LearningConfig, team: Team, lane: DeviceLane, learners: LearnerTeam
) -> ReferenceTeam:
    """Make a frozen copy of each policy of a run; ranks of a sharded learner hold their own."""
    references: dict[str, PolicyReference] = {}
    for name, member in team.members.items():
        settings = member.learner or config.learner
        sharded = _as_sharded(learners.member(name), settings)
        references[name] = (
            Reference(member.model, lane, *settings.micro_batch_size, settings.loss.kl)
            if sharded is None
            else sharded.reference()
        )
    return ReferenceTeam(references)


def _as_sharded(learner: MemberLearner, settings: LearnerConfig) -> "ShardedLearner | None":
    if settings.ranks == 1:
        return None
    from vla_rl.learner.distributed import ShardedLearner

    assert isinstance(learner, ShardedLearner)
    return learner


def sharded_learners(learners: LearnerTeam, team: Team) -> "list[ShardedLearner]":
    """Return the learners of a team that have several ranks."""
    from vla_rl.learner.distributed import ShardedLearner

    each = (learners.member(name) for name in team.members)
    return [learner for learner in each if isinstance(learner, ShardedLearner)]
