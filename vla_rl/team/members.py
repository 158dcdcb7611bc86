"""The policies of a run: one for all agents, or a team with one for each.

Each has its own engine and learner.

    Team({"solver": Member(model), "checker": Member(other)})      pairs, debates: agents that share episodes
    Team({"robot": Member(vla), "language": Member(llm)})          kinds of episodes that share a run

All members compute on the run's device lane and have the same weight version; groups, buffer and
graph are the same as with one policy.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

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
from vla_rl.learner import LearnerConfig
from vla_rl.learner.estimates.rank_memory import training_bytes
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.registry import learns_from_buffer
from vla_rl.rollout import EngineTeam
from vla_rl.types import SOLE_MEMBER, AgentNames

if TYPE_CHECKING:
    from vla_rl.engines.server import ServerChatEngine
    from vla_rl.engines.vllm import VllmActionEngine, VllmChatEngine

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
    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of all policies, and of what their learners store besides."""
        networks = [member.model.network for member in self.members.values()]
        weights = sum(weight.nbytes for network in networks for weight in network.parameters())
        return weights, sum(training_bytes(network) for network in networks)


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
    # several steps, as a head's, need a copy; ranks have weights of their own
    shares = learner.ranks > 1 or (
        learner.steps_once_per_update and not learns_from_buffer(config.pipeline)
    )
    acting = member.model if shares else member.model.copy()
    return make_torch_engine(acting, lane, engine, weight_version)
