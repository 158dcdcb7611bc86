"""The parts of a run that a pipeline may use, as protocols. `vla_rl.run.parts` builds them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vla_rl.pipelines.config import LearningConfig

if TYPE_CHECKING:  # they import torch
    from vla_rl.algorithms import EmbeddingConfig, TrajectoryEncoder
    from vla_rl.engines import DeviceLane, LanguageModel, PolicyModel
    from vla_rl.learner import CriticTeam, ReferenceTeam


class Stateful(Protocol):
    """A value of a pipeline that checkpoints save, such as an adaptive coefficient."""

    def state(self) -> Any:
        """Return the state as plain values and arrays, which must not change afterwards."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a state that `state` returned."""
        ...


class Parts(Protocol):
    """The parts of a run that pipelines use.

    A critic or a reference policy is created when a pipeline first reads it.
    """

    @property
    def config(self) -> LearningConfig:
        """Settings of the run."""
        ...

    @property
    def model(self) -> "PolicyModel[Any] | LanguageModel[Any]":
        """Policy of the run. Raises: ConfigError if several policies learn."""
        ...

    @property
    def lane(self) -> "DeviceLane":
        """Thread that owns the device."""
        ...

    @property
    def critic(self) -> "CriticTeam":
        """Critic of each policy of the run."""
        ...

    @property
    def reference(self) -> "ReferenceTeam":
        """Copy of each policy of the run, as it was when the run began."""
        ...

    @property
    def replay(self) -> Stateful:
        """Replay buffer of the run. Raises: ConfigError if its pipeline has none."""
        ...

    @property
    def collect(self) -> Callable[..., Any]:
        """Node function `Collect`."""
        ...

    @property
    def learn(self) -> Callable[..., Any]:
        """Node function `Learn`."""
        ...

    @property
    def save(self) -> Callable[..., Any]:
        """Node function `Save`."""
        ...

    @property
    def show(self) -> Callable[..., Any]:
        """Node function `Show`."""
        ...

    def trajectory_encoder(self, config: "EmbeddingConfig") -> "TrajectoryEncoder":
        """Make the encoder of trajectories; hosts that run the episodes compute with it too."""
        ...

    def remember(self, name: str, what: Stateful, state_type: Any) -> None:
        """Save the state of `what` in every checkpoint as `state_type`; restore it on a resume."""
        ...
