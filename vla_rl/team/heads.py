"""The learner of a run that trains a head over a frozen policy from a replay buffer.

What such a run cannot do is refused here, before anything is opened: several learner processes, several
policies, a policy without a head. Engines of vLLM serve no heads, and refuse them themselves.
"""

import itertools
from collections.abc import Mapping

import msgspec

from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerTeam
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.models.steered import SteeredPolicy
from vla_rl.pipelines.config import EmbodiedConfig, LearningConfig
from vla_rl.pipelines.registry import learns_from_buffer
from vla_rl.team.members import RunEngines, Team
from vla_rl.types import derive_seed


def require_head(config: LearningConfig, team: Team) -> tuple[str, SteeredPolicy, EmbodiedConfig]:
    """Return the name, policy and configuration of a run that trains a head.

    Raises: ConfigError for what such a run cannot do.
    """
    pipeline = config.pipeline
    if not isinstance(config, EmbodiedConfig):
        raise ConfigError(
            f"pipeline {pipeline!r} reads off_policy and replay, which a {type(config).__name__} lacks; "
            "use an EmbodiedConfig"
        )
    if len(team.members) > 1:
        raise ConfigError(
            f"pipeline {pipeline!r} trains the head of one policy, but the team has "
            f"{sorted(team.members)}; use one policy"
        )
    ((name, member),) = team.members.items()
    if not isinstance(member.model, SteeredPolicy):
        raise ConfigError(
            f"pipeline {pipeline!r} trains a head over a frozen policy, but the policy is a "
            f"{type(member.model).__name__}; put a head over it with "
            "vla_rl.models.steered.SteeredPolicy.create, or use a pipeline that trains its weights"
        )
    if config.off_policy.algorithm == "dsrl" and not member.model.config.steering.steers:
        raise ConfigError(
            "off_policy.algorithm is 'dsrl', which learns the noise that a frozen policy begins with, but "
            f"steering.kind is {member.model.config.steering.kind!r}; set it to 'noise' (or 'tokens', for a token "
            "policy), or use 'sac'"
        )
    if config.off_policy.algorithm == "dagger" and member.model.config.steering.steers:
        raise ConfigError(
            f"off_policy.algorithm is 'dagger', but steering.kind is {member.model.config.steering.kind!r}: an "
            "expert's chunk does not tell what would steer to it; set it to 'residual'"
        )
    require_room(config)
    learner = member.learner or config.learner
    learner.require(
        learner.ranks == 1,
        "ranks",
        f"1 with pipeline {pipeline!r}: a head is small, and one process trains it",
    )
    return name, member.model, config


def require_room(config: EmbodiedConfig, most_decisions: int = 1) -> None:
    """Check that the replay buffer has room for one update, and for what the first gradient step waits for.

    Args:
        config: settings of the run.
        most_decisions: decisions of its longest episode, if they are known.

    Raises: ConfigError.
    """
    replay, first = config.replay, config.off_policy.first_rows
    if replay.source is not None:
        return
    num_episodes = config.scheduler.groups_per_update * config.episodes_per_group
    replay.require(
        replay.capacity >= num_episodes * most_decisions,
        "capacity",
        f"at least {num_episodes * most_decisions}: an update stores {num_episodes} episodes, each of up to "
        f"{most_decisions} decisions",
    )
    has_more = replay.demonstrations is not None or replay.existing == "load"
    config.off_policy.require(
        has_more or first <= replay.capacity,
        "first_rows",
        f"at most replay.capacity, {replay.capacity}: else the first gradient step is never made",
    )


def make_head_learner(
    config: LearningConfig,
    team: Team,
    lane: DeviceLane,
    engines: RunEngines | None,
    weight_version: int,
    others: Mapping[str, WeightSink],
) -> LearnerTeam:
    """Make the learner of a run; arguments are those of `make_learners`.

    Raises: ConfigError for what such a run cannot do.
    """
    name, policy, settings = require_head(config, team)
    sinks: list[WeightSink] = [] if engines is None else [engines.owned[name]]
    if name in others:
        sinks.append(others[name])
    learner = OffPolicyLearner(
        policy,
        lane,
        settings.off_policy,
        RunReplay(policy.layout, settings.replay),
        describe_states=policy.describe_states,
        publish_to=sinks,
        encode_action=lambda chunk: policy.encode(chunk[None])[0],
        weight_version=weight_version,
        seed=derive_seed(config.run.seed, "off_policy"),
    )
    return LearnerTeam({name: learner})


def get_run_replay(learners: LearnerTeam, config: LearningConfig) -> RunReplay:
    """Return the replay buffer of a run. Raises: ConfigError if its pipeline has none."""
    if not learns_from_buffer(config.pipeline):
        raise ConfigError(
            f"pipeline {config.pipeline!r} has no replay buffer, because its READS do not name "
            "'off_policy'; add that and 'replay' to them"
        )
    return get_head_learner(learners).replay


def get_head_learner(learners: LearnerTeam) -> OffPolicyLearner:
    """Return the learner of a run that trains a head."""
    (learner,) = (learners.member(name) for name in learners.names)
    assert isinstance(learner, OffPolicyLearner)
    return learner


def list_memory(config: LearningConfig, team: Team) -> dict[str, int]:
    """Return the bytes that a run of a head needs besides the head, by what they are for.

    Raises: ConfigError for what such a run cannot do.
    """
    _, policy, settings = require_head(config, team)
    off_policy, layout = settings.off_policy, policy.layout
    frozen = sum(each.nbytes for each in policy.base.policy.network.parameters())
    rows = msgspec.structs.replace(layout, features_dtype=settings.replay.features).row_dtype
    widths = (layout.features + layout.proprio + layout.action, *off_policy.critic.hidden, 1)
    numbers = sum(width * after + after for width, after in itertools.pairwise(widths))
    return {
        "the frozen policy": frozen,
        f"the replay buffer, {settings.replay.capacity:,} rows of {rows.itemsize:,} bytes": (
            settings.replay.capacity * rows.itemsize
        ),
        # weights, targets, gradients and both moments
        "critics and their targets": 5 * 4 * numbers * off_policy.num_critics,
    }
