"""Everything that a gradient step of off-policy learning trains, by name, and what it computes with it.

    actor            the policy's head, which acts              ─► target actor (if the algorithm has one)
    critics          K values of an action                      ─► target critics
    values           value of a state (iql, awr)
    temperature      weight of the entropy (sac and its kin)

Networks, targets, moments of the optimizers and counts are all in the state: a resume without one of
them would be another run.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import draw_members, move_target_parameters, reduce_critics
from vla_rl.engines.device_lane import to_host
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import CheckpointError
from vla_rl.learner.backend import Training, WeightSink
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.off_policy.batches import Batch, State
from vla_rl.learner.off_policy.config import (
    DETERMINISTIC,
    ENTROPIC,
    WEIGHTED,
    WITH_Q,
    OffPolicyConfig,
)
from vla_rl.learner.off_policy.critics import (
    ActionCritics,
    StateValues,
    Temperature,
)
from vla_rl.learner.optimizer import PolicyOptimizer, StepReport
from vla_rl.replay import TransitionLayout
from vla_rl.types import derive_seed

OWN: Final = "off_policy/"
"""Prefix of the tensors that are not the actor's optimizer, in a checkpoint's file of moments."""

COUNTS: Final = ("num_steps", "num_actor_steps", "num_rows")
OWED: Final = "owed_steps"

StepMetrics: TypeAlias = dict[str, Tensor | float]
"""Metrics of a step, float32 [] on the device, or numbers."""


class HeadTraining:
    """A head and what is trained beside it; all methods run on the device lane.

    Args:
        model: the policy, whose `network` is the head.
        layout: sizes of the head's states and actions.
        config: algorithm, networks and optimizers.
        publish_to: engines that get the head after each update.
        weight_version: number of updates already applied.
        seed: seed of the critics' initial weights.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        layout: TransitionLayout,
        config: OffPolicyConfig,
        publish_to: Sequence[WeightSink],
        weight_version: int,
        seed: int,
    ) -> None:
        self.config, self.layout = config, layout
        self._training = Training(model, config.actor, publish_to, weight_version)
        self.actor: Any = model.network
        """The head, with `distribution` of a state's actions."""
        device = self._training.device
        sizes = (layout.features, layout.proprio)
        name = config.algorithm
        self.critics: ActionCritics | None = None
        self.target_critics: ActionCritics | None = None
        self.target_actor: Any = None
        self.values: StateValues | None = None
        self.temperature: Temperature | None = None
        if name in WITH_Q:
            critic_seed = derive_seed(seed, "critics") % 2**63
            self.critics = ActionCritics(
                (*sizes, layout.action), config.num_critics, config.critic, critic_seed
            ).to(device)
            self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        if name in DETERMINISTIC:
            # a copy of the policy shares the frozen base, which a copy of the head alone would copy
            self.target_actor = model.copy().network.requires_grad_(False)
        if name in WEIGHTED:
            value_seed = derive_seed(seed, "values") % 2**63
            self.values = StateValues(sizes, config.critic, value_seed).to(device)
        if name in ENTROPIC:
            self.temperature = Temperature(config.initial_temperature).to(device)
        trained = {
            "critics": self.critics,
            "values": self.values,
            "temperature": self.temperature,
        }
        self._optimizers = {
            each: PolicyOptimizer(network, config.critic.optimizer)
            for each, network in trained.items()
            if network is not None
        }
        self.num_steps = 0
        """Gradient steps so far."""
        self.num_actor_steps = 0
        """Those in which the actor was trained too."""
        self.num_rows = 0
        """Decisions that were stored."""
        self.owed_steps = 0.0
        """Gradient steps that stored decisions have earned and that are not made yet."""

    @property
    def device(self) -> torch.device:
        """Device of all networks."""
        return self._training.device

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    def step(self, name: str, loss: Tensor) -> StepReport:
        """Take one optimizer step of the actor, the critics, the values or the temperature."""
        optimizer = self._training.optimizer if name == "actor" else self._optimizers[name]
        parameters = [each for each in optimizer.parameters.values() if each.requires_grad]
        # by hand and not by `backward`, which would leave gradients of the actor's loss in the critics
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            parameter.grad = gradient
        return optimizer.step()

    def follow(self) -> None:
        """Move the target networks towards the trained ones."""
        pairs = ((self.target_critics, self.critics), (self.target_actor, self.actor))
        for target, source in pairs:
            if target is not None and source is not None:
                move_target_parameters(
                    target.parameters(), source.parameters(), rate=self.config.critic.tau
                )

    @torch.no_grad()
    def value_rows(self, batch: Batch) -> Tensor:
        """Return the critic's value of executed actions, or else of states, float32 [N] on the host."""
        state = batch.state
        if self.critics is not None:
            found = self.critics(state.features, state.proprio, batch.action)
            return to_host(reduce_critics(found))[0]
        assert self.values is not None, "algorithms without values are not asked"
        return to_host(self.values(state.features, state.proprio))[0]

    @property
    def has_values(self) -> bool:
        """Whether there are critics, or values of states."""
        return self.critics is not None or self.values is not None

    def publish(self) -> None:
        """Raise the version, and give the head to the engines."""
        self._training.publish_unchanged()

    def snapshot(self) -> TrainingState:
        """Copy all state to the CPU."""
        state = self._training.snapshot()
        own = {f"{OWN}{name}": tensor.detach().to("cpu", copy=True) for name, tensor in self._own()}
        return TrainingState(
            weight_version=state.weight_version,
            policy=state.policy,
            optimizer={**dict(_plain(state)), **own},
            rng=state.rng,
            policy_files=state.policy_files,
        )

    def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it.

        Raises: CheckpointError if it is of another algorithm, other networks or another policy.
        """
        moments = dict(_plain(state))
        own = {
            name.removeprefix(OWN): moments.pop(name)
            for name in list(moments)
            if name.startswith(OWN)
        }
        if not own:
            raise CheckpointError(
                "the checkpoint has no critics, targets or counts of off-policy learning; resume with "
                "the pipeline that made it."
            )
        self._load(own)
        self._training.restore(
            TrainingState(
                weight_version=state.weight_version,
                policy=state.policy,
                optimizer=moments,
                rng=state.rng,
                policy_files=state.policy_files,
            )
        )

    def _networks(self) -> dict[str, nn.Module]:
        found = {
            "critics": self.critics,
            "target_critics": self.target_critics,
            "target_actor": self.target_actor,
            "values": self.values,
            "temperature": self.temperature,
        }
        return {name: network for name, network in found.items() if network is not None}

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        for name, network in self._networks().items():
            for key, tensor in network.state_dict().items():
                yield f"{name}/{key}", tensor
        for name, optimizer in self._optimizers.items():
            for key, tensor in optimizer.state_tensors().items():
                yield f"moments/{name}/{key}", tensor
        for name in COUNTS:
            yield name, torch.tensor(getattr(self, name))
        yield OWED, torch.tensor(self.owed_steps, dtype=torch.float64)

    def _load(self, own: Mapping[str, Tensor]) -> None:
        expected = {name.split("/")[0] for name, _ in self._own()}
        found = {name.split("/")[0] for name in own}
        if expected != found:
            raise CheckpointError(
                f"the checkpoint of off-policy learning has {sorted(found)}, expected {sorted(expected)}; "
                f"resume with the algorithm that made it (this one is {self.config.algorithm})."
            )
        try:
            for name, network in self._networks().items():
                network.load_state_dict(_below(own, f"{name}/"))
        except RuntimeError as error:
            raise CheckpointError(
                f"the checkpoint's networks are not of this shape: {error}; resume with the same "
                "off_policy.critic settings."
            ) from error
        for name, optimizer in self._optimizers.items():
            optimizer.load_tensors(_below(own, f"moments/{name}/"))
        for name in COUNTS:
            setattr(self, name, int(own[name]))
        self.owed_steps = float(own[OWED])


def _plain(state: TrainingState) -> Mapping[str, Tensor]:
    if not isinstance(state.optimizer, Mapping):
        raise CheckpointError("the state is staged by ranks, expected that of one process.")
    return state.optimizer


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class Draws:
    """Random numbers of one gradient step.

    Args:
        seed: the step's own.
        device: device that they are copied to.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed % 2**63, device
        self._generator = torch.Generator().manual_seed(self._seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers in [0, 1)."""
        return torch.rand(*shape, generator=self._generator).to(self._device)

    def members(self, num: int, drawn: int) -> Tensor | None:
        """Draw different critics; None: all."""
        return None if drawn == num else draw_members(num, drawn, seed=self._seed)


def act(actor: Any, state: State) -> Any:
    """Return the distribution of the head's actions."""
    return actor.distribution(state.features, state.proprio, state.reference)


def value_actions(critics: ActionCritics, state: State, action: Tensor) -> Tensor:
    """Return values [E, N]."""
    found: Tensor = critics(state.features, state.proprio, action)
    return found


def get_critics(training: HeadTraining) -> tuple[ActionCritics, ActionCritics]:
    """Return critics and target critics."""
    assert training.critics is not None
    assert training.target_critics is not None
    return training.critics, training.target_critics


def draw_actions(training: HeadTraining, state: State, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw the actor's actions [N, A] with their log-densities [N]."""
    distribution = act(training.actor, state)
    action, log_prob = distribution.sample_with_log_prob(draws.normal(*distribution.mean.shape))
    return action, log_prob.sum(-1)


def value_states(network: StateValues | None, state: State) -> Tensor:
    """Return values of states, [N]."""
    assert network is not None
    found: Tensor = network(state.features, state.proprio)
    return found
