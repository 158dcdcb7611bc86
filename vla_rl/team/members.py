"""The policies of a run: one for all agents, or a team with one for each.

Each has its own engine and learner.

    Team({"solver": Member(model), "checker": Member(other)})      pairs, debates: agents that share episodes
    Team({"robot": Member(vla), "language": Member(llm)})          kinds of episodes that share a run

All members compute on the run's device lane and have the same weight version; groups, buffer and
graph are the same as with one policy.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from vla_rl.actors import Runtime
from vla_rl.engines import (
    DeviceLane,
    EngineConfig,
    LanguageModel,
    PolicyModel,
    TorchActionEngine,
    TorchChatEngine,
    make_torch_engine,
)
from vla_rl.engines.policy_model import missing_methods, unfit_for_learning
from vla_rl.errors import ConfigError
from vla_rl.learner import (
    Critic,
    CriticConfig,
    CriticTeam,
    Learner,
    LearnerConfig,
    LearnerTeam,
    PolicyCritic,
    PolicyLearner,
    PolicyReference,
    Reference,
    ReferenceTeam,
)
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.estimates.rank_memory import measure_policy, rank_memory, training_bytes
from vla_rl.pipelines.config import LearningConfig
from vla_rl.rollout import EngineTeam
from vla_rl.rollout.engines import LaggingEngine
from vla_rl.types import SOLE_MEMBER, AgentNames, derive_seed

if TYPE_CHECKING:
    from vla_rl.engines.server import ServerChatEngine
    from vla_rl.engines.vllm import VllmActionEngine, VllmChatEngine
    from vla_rl.learner.distributed import ShardedLearner


RunModel: TypeAlias = PolicyModel[Any] | LanguageModel[Any]

OwnedEngine: TypeAlias = (
    "TorchActionEngine | TorchChatEngine | VllmActionEngine | VllmChatEngine | ServerChatEngine"
)
"""An engine that a run opens, gives weights to, and closes."""


@dataclass(frozen=True)
class Member:
    """One policy of a team.

    Raises: ConfigError if it lacks methods that engines and learners call.
    """

    model: RunModel

    engine: EngineConfig | None = None
    """Settings of its engine. None: those of the run."""

    learner: LearnerConfig | None = None
    """Settings of its learner. None: those of the run. The loss must be one that the run's pipeline
    supports."""

    shown_images: tuple[tuple[int, int], ...] = ()
    """Height and width of each image that every conversation shows, in pixels, if that is known: a
    GPU that cannot learn from them is refused before the run starts."""

    def __post_init__(self) -> None:
        # A class has the methods too, so the checks below would let it pass.
        if isinstance(self.model, type):
            raise ConfigError(
                f"the policy is the class {self.model.__name__}, expected an instance of it"
            )
        protocol = LanguageModel if hasattr(self.model, "render") else PolicyModel
        # Found now: learners call some of these methods only after the first rollout.
        missing = missing_methods(self.model, protocol)
        if missing:
            raise ConfigError(
                f"{type(self.model).__name__} lacks {', '.join(missing)} of "
                f"vla_rl.engines.{protocol.__name__}; vla_rl.models.mlp.MlpPolicy is a small "
                "complete example"
            )
        fault = unfit_for_learning(self.model)
        if fault is not None:
            raise ConfigError(f"{type(self.model).__name__} has {fault}")


@dataclass(frozen=True)
class Team:
    """The policies that learn in one run.

    Raises: ConfigError if it has no members.
    """

    members: Mapping[str, Member]
    """Members by the name of the agent that each acts for; `SOLE_MEMBER` alone acts for all."""

    updates_per_turn: int | None = None
    """Consecutive updates in which one member learns while the others are frozen. None: all members
    learn in each update."""

    learning: tuple[str, ...] | None = None
    """Members that learn; the others keep their weights. None: all."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError(
                "the team has no members, expected one for each agent of the environments"
            )
        if (
            self.learning is not None
            and not set(self.learning) & self.members.keys() == set(self.learning) != set()
        ):
            raise ConfigError(
                f"Team.learning is {self.learning}, expected some of the members {sorted(self.members)}"
            )

    @classmethod
    def of(cls, model: "Trainable") -> "Team":
        """Return a team, or the team of one that a policy is."""
        return model if isinstance(model, Team) else cls({SOLE_MEMBER: Member(model)})

    def showing(self, images: tuple[tuple[int, int], ...]) -> "Team":
        """Return the same team, whose conversations all show images of these sizes."""
        members = {
            name: replace(member, shown_images=images) for name, member in self.members.items()
        }
        return replace(self, members=members)

    @property
    def agent_names(self) -> AgentNames:
        """Names of the members."""
        return AgentNames(self.members)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of all policies, and of what their learners store besides."""
        networks = [member.model.network for member in self.members.values()]
        weights = sum(weight.nbytes for network in networks for weight in network.parameters())
        return weights, sum(training_bytes(network) for network in networks)


SettingsT = TypeVar("SettingsT", LearnerConfig, CriticConfig)

Trainable: TypeAlias = RunModel | Team
"""A model that `train` accepts: one policy for all agents, or a team."""


class RunEngines(EngineTeam):
    """The engines of a team, opened and closed together.

    Args:
        engines: engines by the name of the agent that each acts for.
    """

    def __init__(self, engines: Mapping[str, OwnedEngine]) -> None:
        super().__init__(engines)
        self._owned = dict(engines)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for engine in self._owned.values():
                await stack.enter_async_context(engine)
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open.__aexit__(kind, error, traceback)

    @property
    def owned(self) -> Mapping[str, OwnedEngine]:
        """Engines by name."""
        return self._owned

    @property
    def busy_share(self) -> float:
        """Busy share of the busiest engine."""
        return max(engine.stats().busy_share for engine in self._owned.values())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the engines, each with its policy's name."""
        agent_names = AgentNames(self._owned)
        return {
            f"{agent_names.get_prefix(name)}{key}": value
            for name, engine in self._owned.items()
            for key, value in engine.metrics().items()
        }


def make_engines(
    config: LearningConfig,
    team: Team,
    lane: DeviceLane,
    weight_version: int,
    gpus: Sequence[str] = (),
) -> RunEngines:
    """Make the engines that a run acts with.

    Args: `gpus`, ids of GPUs that engines of vLLM share out; empty: they see what this process sees.

    Raises: ConfigError if one cannot serve its policy.
    """
    return RunEngines(
        {
            name: _make_engine(config, member, lane, weight_version, gpus)
            for name, member in team.members.items()
        }
    )


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
    learners: dict[str, PolicyLearner] = {}
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


def _as_sharded(learner: PolicyLearner, settings: LearnerConfig) -> "ShardedLearner | None":
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


def _make_engine(
    config: LearningConfig,
    member: Member,
    lane: DeviceLane,
    weight_version: int,
    gpus: Sequence[str],
) -> OwnedEngine:
    engine, learner = member.engine or config.engine, member.learner or config.learner
    engine.require(
        engine.is_deterministic == config.engine.is_deterministic,
        "is_deterministic",
        f"{config.engine.is_deterministic}, as for the run's engine, because one alone is not "
        "reproducible",
    )
    if engine.kind == "vllm":
        from vla_rl.engines.vllm.engine_kinds import make_vllm_engine
        from vla_rl.models.vllm import serve

        served = serve(member.model, max_context=engine.max_context, max_images=engine.max_images)
        return make_vllm_engine(served, lane, engine, weight_version, gpus)
    if engine.kind == "server":
        from vla_rl.engines.server import ServerChatEngine
        from vla_rl.models.vllm import serve

        asked: Any = serve(member.model, max_context=engine.max_context)
        return ServerChatEngine(asked, lane, engine, weight_version)
    # in the middle of an update the learner's weights are no version to act with, so updates of
    # several steps need a copy; ranks have weights of their own
    shares = learner.steps_once_per_update or learner.ranks > 1
    acting = member.model if shares else member.model.copy()
    return make_torch_engine(acting, lane, engine, weight_version)
