"""What a pipeline is made of, as far as a pipeline knows it. `vla_rl.training.parts` puts the parts of a run together."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vla_rl.pipelines.config import LearningConfig

if TYPE_CHECKING:  # they import torch
    from vla_rl.engines import DeviceLane, LanguageModel, PolicyModel
    from vla_rl.learning import Critic, CriticTeam, Reference, ReferenceTeam


class Stateful(Protocol):
    """A value of a pipeline that a run goes on from, such as an adaptive coefficient."""

    def state(self) -> Any:
        """Return plain values and arrays that do not change afterwards."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned."""
        ...


class Parts(Protocol):
    """The parts of a run that pipelines use. A critic or a reference policy exists once a pipeline has read it."""

    @property
    def config(self) -> LearningConfig:
        """The settings of the run."""
        ...

    @property
    def model(self) -> "PolicyModel[Any] | LanguageModel[Any]":
        """The policy. Raises: ConfigError if several policies learn."""
        ...

    @property
    def lane(self) -> "DeviceLane":
        """The thread that owns the device."""
        ...

    @property
    def critic(self) -> "Critic | CriticTeam":
        """The critic, or one for each member of a team."""
        ...

    @property
    def reference(self) -> "Reference | ReferenceTeam":
        """The policy as the run began."""
        ...

    @property
    def collect(self) -> Callable[..., Any]:
        """A node function: `Collect`."""
        ...

    @property
    def learn(self) -> Callable[..., Any]:
        """A node function: `Learn`."""
        ...

    @property
    def save(self) -> Callable[..., Any]:
        """A node function: `Save`."""
        ...

    @property
    def show(self) -> Callable[..., Any]:
        """A node function: `Show`."""
        ...

    def remember(self, name: str, what: Stateful, state_type: Any) -> None:
        """Save the state of `what` in every checkpoint, as `state_type`, and restore it on a resume."""
        ...
