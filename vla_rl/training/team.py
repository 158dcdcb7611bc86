"""The policies of a run: one for all agents, or a team with one for each agent, each with its own
engine and learner.

    Team({"solver": Member(model), "checker": Member(other)})      pairs, debates: agents that share
    episodes Team({"robot": Member(vla), "language": Member(llm)})          kinds of episodes that
    share a run

All members compute on the run's device lane and have the same weight version; groups, buffer and
graph are the same as with one policy.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane, EngineConfig, LanguageModel, PolicyModel, TorchEngine
from vla_rl.engines.policy_model import missing_methods, unfit_for_learning
from vla_rl.errors import ConfigError
from vla_rl.learning import Learner, LearnerConfig
from vla_rl.learning.optimizer import training_bytes
from vla_rl.learning.team import LearnerTeam
from vla_rl.pipelines.config import LearningConfig
from vla_rl.rollout import EngineTeam

if TYPE_CHECKING:
    from vla_rl.engines.vllm import VllmEngine
    from vla_rl.learning.sharded import ShardedLearner

RunModel: TypeAlias = PolicyModel[Any] | LanguageModel[Any]


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

    def __post_init__(self) -> None:
        if isinstance(self.model, type):
            raise ConfigError(
                f"the policy is the class {self.model.__name__}, expected an instance of it"
            )
        protocol = LanguageModel if hasattr(self.model, "render") else PolicyModel
        missing = missing_methods(self.model, protocol)
        if missing:
            raise ConfigError(
                f"{type(self.model).__name__} lacks {', '.join(missing)} of "
                f"vla_rl.engines.{protocol.__name__}; "
                "vla_rl.models.mlp.MlpPolicy is a small complete example"
            )
        fault = unfit_for_learning(self.model)
        if fault is not None:
            raise ConfigError(f"{type(self.model).__name__} has {fault}")


@dataclass(frozen=True)
class Team:
    """Several policies that learn in one run.

    Raises: ConfigError if it has no members.
    """

    members: Mapping[str, Member]
    """Members by the name of the agent that each acts for."""

    updates_per_turn: int | None = None
    """Consecutive updates in which one member learns while the others are frozen. None: all members
    learn in each update."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError(
                "the team has no members, expected one for each agent of the environments"
            )


class RunEngines(EngineTeam):
    """The engines of a team, opened and closed together.

    Args:
        engines: engines by the name of the agent that each acts for.
    """

    def __init__(self, engines: "Mapping[str, TorchEngine | VllmEngine]") -> None:
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
    def owned(self) -> "Mapping[str, TorchEngine | VllmEngine]":
        """Engines by name."""
        return self._owned


def members_of_run(model: RunModel | Team) -> dict[str, Member]:
    """Return all policies of a run by name; a single policy for all agents has the name ""."""
    return dict(model.members) if isinstance(model, Team) else {"": Member(model)}


def engines_of(
    config: LearningConfig, model: RunModel | Team, lane: DeviceLane, weight_version: int
) -> "RunEngines | TorchEngine | VllmEngine":
    """Make the engine, or engines, that a run acts with.

    Raises: ConfigError if one cannot serve its policy.
    """
    engines = {
        name: _engine_of(config, member, lane, weight_version)
        for name, member in members_of_run(model).items()
    }
    return RunEngines(engines) if isinstance(model, Team) else engines[""]


def learners_of(
    config: LearningConfig,
    model: RunModel | Team,
    lane: DeviceLane,
    engine: "RunEngines | TorchEngine | VllmEngine",
    weight_version: int,
    runtime: Runtime,
) -> "Learner | ShardedLearner | LearnerTeam":
    """Make the learner, or learners, of a run.

    Each publishes its weights to its policy's engine. Raises: ConfigError if several ranks cannot
    train this policy.
    """
    if isinstance(model, Team):
        for member in model.members.values():
            settings = member.learner or config.learner
            settings.require(settings.ranks == 1, "ranks", "1 in a team of several policies")
    elif config.learner.ranks > 1:
        # imported here, because one process pays nothing for what several need
        from vla_rl.learning.sharded import ShardedLearner

        assert not isinstance(engine, RunEngines)
        return ShardedLearner(
            model, runtime, lane, config.learner, [engine], weight_version=weight_version
        )
    sinks = engine.owned if isinstance(engine, RunEngines) else {"": engine}
    learners = {
        name: Learner(
            member.model,
            lane,
            member.learner or config.learner,
            publish_to=[sinks[name]],
            weight_version=weight_version,
        )
        for name, member in members_of_run(model).items()
    }
    return (
        LearnerTeam(learners, model.updates_per_turn) if isinstance(model, Team) else learners[""]
    )


def bytes_of(model: RunModel | Team) -> tuple[int, int]:
    """Return the bytes of the weights of all policies of a run, and of what their learners store
    besides.
    """
    networks = [member.model.network for member in members_of_run(model).values()]
    weights = sum(parameter.nbytes for network in networks for parameter in network.parameters())
    return weights, sum(training_bytes(network) for network in networks)


def _engine_of(
    config: LearningConfig, member: Member, lane: DeviceLane, weight_version: int
) -> "TorchEngine | VllmEngine":
    engine, learner = member.engine or config.engine, member.learner or config.learner
    engine.require(
        engine.is_deterministic == config.engine.is_deterministic,
        "is_deterministic",
        f"{config.engine.is_deterministic}, as for the run's engine, because one alone is not "
        "reproducible",
    )
    if engine.kind == "vllm":
        from vla_rl.engines.vllm import VllmEngine
        from vla_rl.models.serving import serve

        return VllmEngine(
            serve(member.model, max_context=engine.max_context), lane, engine, weight_version
        )
    # in the middle of an update the learner's weights are no version to act with, so updates of
    # several steps need a copy; ranks have weights of their own
    shares = learner.steps_once_per_update or learner.ranks > 1
    acting = member.model if shares else member.model.copy()
    return TorchEngine(acting, lane, engine, weight_version)
