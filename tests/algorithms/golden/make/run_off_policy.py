"""Run TD3 and SAC of stable-baselines3, CQL, IQL, TD3+BC and SAC of d3rlpy on given batches.

Everything is computed in float64. Batches and weights follow from a seed. What the projects draw
themselves (target noise, samples of actors, uniform actions) is given to them or drawn again from
the same seed, and kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import torch
from d3rlpy.algos import CQLConfig, IQLConfig, SACConfig, TD3PlusBCConfig
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.torch_utility import TorchMiniBatch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.buffers import ReplayBufferSamples
from torch import Tensor, nn

FOLDER = Path(__file__).parent.parent
ROWS, STATE, ACTION, SAMPLES = 9, 5, 3, 4
SEED = 46


def make_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    return {
        "state": normal(ROWS, STATE),
        "next_state": normal(ROWS, STATE),
        "action": (0.6 * normal(ROWS, ACTION)).clamp(-0.95, 0.95),
        "rewards": normal(ROWS, 1),
        "terminated": (torch.rand(ROWS, 1, generator=draw) < 0.3).double(),
        "num_rewards": torch.tensor([[1.0], [2.0], [3.0]] * 3),
    }


def set_weights(network: nn.Module, seed: int, scale: float = 0.3) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=draw))


def weights(prefix: str, network: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": each.detach().clone() for name, each in network.named_parameters()}


def gradients(prefix: str, network: nn.Module) -> dict[str, Tensor]:
    named = network.named_parameters()
    return {f"{prefix}/{name}": each.grad.clone() for name, each in named if each.grad is not None}


@contextmanager
def given_noise(seed: int) -> Iterator[list[Tensor]]:
    """Samples of torch's Gaussians are this list's, in the order of drawing."""
    draw, drawn = torch.Generator().manual_seed(seed), []

    def standard_normal(shape: Any, dtype: Any, device: Any) -> Tensor:
        drawn.append(torch.randn(tuple(shape), generator=draw, dtype=dtype))
        return drawn[-1]

    with mock.patch("torch.distributions.normal._standard_normal", standard_normal):
        yield drawn


class Kept:
    """An optimizer that keeps the gradients it was given, and moves nothing."""

    def __init__(self, network: nn.Module | None = None, parameter: Tensor | None = None) -> None:
        self.network, self.parameter = network, parameter
        self.param_groups: list[dict[str, Any]] = []
        self.kept: dict[str, Tensor] = {}

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for each in self.network.parameters() if self.network else [self.parameter]:
            each.grad = None

    def step(self, *_: Any, **__: Any) -> None:
        if self.network is None:
            self.kept = {"": self.parameter.grad.clone()}
        else:
            self.kept = gradients("", self.network)

    def saved(self, prefix: str) -> dict[str, Tensor]:
        return {prefix + name: value for name, value in self.kept.items()}


class OneBatch(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (STATE,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,))


def baseline(kind: type, batch: dict[str, Tensor]) -> tuple[Any, dict[str, float]]:
    """A model of stable-baselines3 whose replay gives this batch, and what it will log."""
    options = {"policy_kwargs": {"net_arch": [8, 8]}, "buffer_size": 1, "gamma": 0.9}
    options |= {"policy_delay": 1} if kind is TD3 else {"ent_coef": "auto_0.2"}
    model = kind("MlpPolicy", OneBatch(), device="cpu", **options)
    samples = ReplayBufferSamples(
        observations=batch["state"],
        actions=batch["action"],
        next_observations=batch["next_state"],
        dones=batch["terminated"],
        rewards=batch["rewards"],
        discounts=0.9 ** batch["num_rewards"],
    )
    model.replay_buffer = SimpleNamespace(sample=lambda *_, **__: samples)
    logged: dict[str, float] = {}
    record = lambda name, value, **_: logged.__setitem__(name, value)  # noqa: E731
    model.set_logger(SimpleNamespace(record=record))
    for seed, name in enumerate(("actor", "critic", "critic_target", "actor_target")):
        if hasattr(model, name):
            set_weights(getattr(model, name), seed)
    if kind is SAC:  # 1e-6 is added to 1 - tanh^2 otherwise, which float64 does not need
        model.actor.action_dist.epsilon = 0.0
    model.actor.optimizer, model.critic.optimizer = Kept(model.actor), Kept(model.critic)
    return model, logged


def run_td3(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model, logged = baseline(TD3, batch)
    found: dict[str, Tensor] = {}
    for name in ("actor", "critic", "critic_target", "actor_target"):
        found |= weights(name, getattr(model, name))
    torch.manual_seed(SEED)
    found["noise"] = batch["action"].clone().normal_(0, model.target_policy_noise)
    torch.manual_seed(SEED)
    model.train(1)
    found |= model.critic.optimizer.saved("grad/critic") | model.actor.optimizer.saved("grad/actor")
    found |= weights("moved", model.critic_target)
    return found | losses(logged, "critic_loss", "actor_loss")


def run_sac(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model, logged = baseline(SAC, batch)
    model.ent_coef_optimizer = Kept(parameter=model.log_ent_coef)
    found: dict[str, Tensor] = {}
    for name in ("actor", "critic", "critic_target"):
        found |= weights(name, getattr(model, name))
    with given_noise(SEED) as drawn:
        model.train(1)
    found |= {"noise": drawn[0], "next_noise": drawn[1]}
    found |= model.critic.optimizer.saved("grad/critic") | model.actor.optimizer.saved("grad/actor")
    found |= model.ent_coef_optimizer.saved("grad/log_temperature")
    found["log_temperature"] = model.log_ent_coef.detach()
    return found | losses(logged, "critic_loss", "actor_loss", "ent_coef_loss")


def losses(logged: dict[str, float], *names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(float(logged[f"train/{name}"])) for name in names}


def offline(config: Any) -> tuple[Any, dict[str, Tensor]]:
    """d3rlpy's implementation of an algorithm with weights by seed, and those weights."""
    algorithm = config.create()
    algorithm.create_impl((STATE,), ACTION)
    impl, found = algorithm.impl, {}
    names = ("policy", "q_funcs", "targ_q_funcs", "targ_policy", "value_func", "log_temp")
    for seed, name in enumerate((*names, "log_alpha")):
        network = getattr(impl._modules, name, None)
        if network is not None:
            if not name.startswith("log_"):
                set_weights(network, 10 + seed)
            found |= weights(name, network)
    return impl, found


def mini_batch(batch: dict[str, Tensor]) -> TorchMiniBatch:
    return TorchMiniBatch(
        observations=batch["state"],
        actions=batch["action"],
        rewards=batch["rewards"],
        next_observations=batch["next_state"],
        next_actions=torch.zeros_like(batch["action"]),
        returns_to_go=torch.zeros_like(batch["rewards"]),
        terminals=batch["terminated"],
        intervals=batch["num_rewards"],
        device="cpu",
    )


def encoders() -> dict[str, Any]:
    small = VectorEncoderFactory([8, 8])
    return {"actor_encoder_factory": small, "critic_encoder_factory": small, "gamma": 0.9}


def run_cql(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    config = CQLConfig(
        **encoders(),
        n_action_samples=SAMPLES,
        soft_q_backup=True,
        alpha_threshold=2.0,
        initial_alpha=1.5,
        initial_temperature=0.3,
    )
    impl, found = offline(config)
    alpha = Kept(impl._modules.log_alpha)
    object.__setattr__(impl._modules, "alpha_optim", alpha)
    with given_noise(SEED) as drawn:
        target = impl.compute_target(mini_batch(batch))
        torch.manual_seed(SEED)
        loss = impl.compute_critic_loss(mini_batch(batch), target)
    torch.manual_seed(SEED)
    found["uniform"] = torch.zeros(ROWS * SAMPLES, ACTION).uniform_(-1.0, 1.0)
    found |= dict(zip(("next_noise", "samples", "next_samples"), drawn, strict=True))
    impl._modules.q_funcs.zero_grad()
    loss.critic_loss.backward()
    found |= {"critic_loss": loss.critic_loss, "conservative_loss": loss.conservative_loss}
    found |= gradients("grad/q_funcs", impl._modules.q_funcs) | alpha.saved("grad/log_alpha")
    return found | {"target": target}


def run_d3rlpy_sac(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    impl, found = offline(SACConfig(**encoders(), initial_temperature=0.3))
    temperature = Kept(impl._modules.log_temp)
    object.__setattr__(impl._modules, "temp_optim", temperature)
    with given_noise(SEED) as drawn:
        loss = impl.compute_actor_loss(mini_batch(batch), impl._modules.policy(batch["state"]))
    impl._modules.policy.zero_grad()
    loss.actor_loss.backward()
    found |= {"noise": drawn[0], "actor_loss": loss.actor_loss, "temperature_loss": loss.temp_loss}
    found |= gradients("grad/policy", impl._modules.policy)
    return found | temperature.saved("grad/log_temp")


def run_iql(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    config = IQLConfig(
        **encoders(),
        value_encoder_factory=VectorEncoderFactory([8, 8]),
        expectile=0.8,
        weight_temp=2.0,
        max_weight=1.5,
    )
    impl, found = offline(config)
    modules, given = impl._modules, mini_batch(batch)
    loss = impl.compute_critic_loss(given, impl.compute_target(given))
    loss.critic_loss.backward()
    found |= {"q_loss": loss.q_loss, "v_loss": loss.v_loss}
    found |= gradients("grad/q_funcs", modules.q_funcs)
    found |= gradients("grad/value_func", modules.value_func)
    modules.policy.zero_grad()
    actor_loss = impl.compute_actor_loss(given, modules.policy(batch["state"])).actor_loss
    actor_loss.backward()
    return found | {"actor_loss": actor_loss} | gradients("grad/policy", modules.policy)


def run_td3_bc(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    impl, found = offline(TD3PlusBCConfig(**encoders(), alpha=2.5))
    policy = impl._modules.policy
    loss = impl.compute_actor_loss(mini_batch(batch), policy(batch["state"])).actor_loss
    loss.backward()
    return found | {"actor_loss": loss} | gradients("grad/policy", policy)


def save(project: str, results: dict[str, dict[str, Tensor]]) -> None:
    arrays = {f"batch/{name}": value.numpy() for name, value in make_batch().items()}
    for case, values in results.items():
        arrays |= {f"{case}/{name}": np.asarray(value.detach()) for name, value in values.items()}
    np.savez_compressed(FOLDER / f"{project}.npz", **dict(sorted(arrays.items())))


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    given = make_batch()
    # stable-baselines3 converts observations to float32
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        save("sb3", {"td3": run_td3(given), "sac": run_sac(given)})
    results = {"cql": run_cql(given), "sac": run_d3rlpy_sac(given)}
    save("d3rlpy", results | {"iql": run_iql(given), "td3_bc": run_td3_bc(given)})
