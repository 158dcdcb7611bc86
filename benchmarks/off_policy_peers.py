"""Compare off-policy losses with stable-baselines3's TD3 and SAC, d3rlpy's CQL, SAC, IQL and TD3+BC.

What was executed is in `tests/algorithms/golden/make/run_off_policy.py`. Both projects add losses of
critics up, where ours is a mean: factors below say so.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from benchmarks.golden_networks import GoldenWeights, load_arrays, relative_difference
from vla_rl.algorithms import off_policy

GAMMA: Final = 0.9

SB3_CRITICS: Final = ("qf0", "qf1")
D3RLPY_LAYERS: Final = ("_encoder._layers.0", "_encoder._layers.2")
D3RLPY_CRITICS: Final = ("0", "1")


class Batch:
    """The batch that all algorithms of a project were given."""

    def __init__(self, golden: Mapping[str, Tensor]) -> None:
        given = {name: golden[f"batch/{name}"] for name in ("state", "next_state", "action")}
        self.state, self.next_state, self.action = given.values()
        self.terminated = golden["batch/terminated"][:, 0] > 0.5
        self.num_rewards = golden["batch/num_rewards"][:, 0].long()
        # the projects' rewards are those of n steps together: the first step has them all here
        horizon = int(self.num_rewards.max())
        rewards = torch.zeros(len(self.state), horizon)
        rewards[:, 0] = golden["batch/rewards"][:, 0]
        self.returns = off_policy.chunk_returns(rewards, self.num_rewards, gamma=GAMMA)
        self.discounts = off_policy.bootstrap_discounts(self.num_rewards, gamma=GAMMA)

    def targets(self, next_values: Tensor) -> Tensor:
        """Return the TD targets, float32 [B], for values [B] of the successors."""
        return off_policy.td_targets(self.returns, self.discounts, self.terminated, next_values)


class Critics:
    """Critics of a golden file, of either project."""

    def __init__(self, golden: Mapping[str, Tensor], network: str) -> None:
        self.weights = GoldenWeights.read(golden, network)
        if "qf0.0.weight" in self.weights.tensors:
            self._layers = [[f"{name}.{i}" for i in (0, 2, 4)] for name in SB3_CRITICS]
        else:
            names = (*D3RLPY_LAYERS, "_fc")
            self._layers = [[f"{q}.{layer}" for layer in names] for q in D3RLPY_CRITICS]

    def __call__(self, state: Tensor, action: Tensor) -> Tensor:
        """Return values, float32 [E, ...], of states [..., S] and actions [..., A]."""
        seen = torch.cat([state, action], dim=-1)
        return torch.stack([self.weights.apply(each, seen)[..., 0] for each in self._layers])


def compare_stable_baselines() -> dict[str, float]:
    """Compare with stable-baselines3: losses and gradients of TD3 and SAC, and TD3's target network."""
    golden = load_arrays("sb3")
    batch = Batch(golden)
    found = {f"td3/{name}": value for name, value in _run_td3(_part(golden, "td3"), batch).items()}
    found |= {f"sac/{name}": value for name, value in _run_sac(_part(golden, "sac"), batch).items()}
    return _compare(found, golden)


def compare_d3rlpy() -> dict[str, float]:
    """Compare with d3rlpy: losses and gradients of CQL's critic, IQL, and the actors of SAC, TD3+BC."""
    golden = load_arrays("d3rlpy")
    batch = Batch(golden)
    found: dict[str, Tensor] = {}
    for name, run in (
        ("cql", _run_cql),
        ("sac", _run_d3rlpy_actor),
        ("iql", _run_iql),
        ("td3_bc", _run_td3_bc),
    ):
        case = run(_part(golden, name), batch)
        found |= {f"{name}/{key}": value for key, value in case.items()}
    return _compare(found, golden)


def _run_td3(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, target_critics = Critics(golden, "critic"), Critics(golden, "critic_target")
    actor, target_actor = (GoldenWeights.read(golden, name) for name in ("actor", "actor_target"))
    layers = ["mu.0", "mu.2", "mu.4"]
    # the stored noise has its standard deviation already
    next_action = off_policy.noisy_target_actions(
        torch.tanh(target_actor.apply(layers, batch.next_state)),
        golden["noise"] / 0.2,
        scale=0.2,
        noise_bound=0.5,
    )
    next_values = off_policy.reduce_critics(target_critics(batch.next_state, next_action))
    values = critics(batch.state, batch.action)
    critic_loss = 2.0 * off_policy.td_loss(values, batch.targets(next_values))
    action = torch.tanh(actor.apply(layers, batch.state))
    q = off_policy.reduce_critics(critics(batch.state, action), "first")
    no_cloning = off_policy.LossWeights(bc=0.0, q=1.0)
    actor_loss = off_policy.value_and_cloning_loss(q, torch.zeros_like(q), no_cloning)
    found = {"critic_loss": critic_loss, "actor_loss": actor_loss}
    found |= critics.weights.gradients(critic_loss, "grad/critic")
    found |= actor.gradients(actor_loss, "grad/actor")
    moved = [each.detach().clone() for each in target_critics.weights.tensors.values()]
    off_policy.move_target_parameters(moved, critics.weights.tensors.values(), rate=0.005)
    names = critics.weights.tensors
    return found | {f"moved/{name}": each for name, each in zip(names, moved, strict=True)}


def _run_sac(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, target_critics = Critics(golden, "critic"), Critics(golden, "critic_target")
    actor = GoldenWeights.read(golden, "actor")
    log_temperature = golden["log_temperature"][0].clone().requires_grad_()
    temperature = log_temperature.detach().exp()

    def draw(state: Tensor, noise: Tensor) -> off_policy.SampledActions:
        trunk = ["latent_pi.0", "latent_pi.2"]
        mean, log_std = (actor.apply([*trunk, head], state) for head in ("mu", "log_std"))
        return off_policy.sample_squashed(mean, log_std.clamp(-20.0, 2.0), noise)

    following = draw(batch.next_state, golden["next_noise"])
    next_values = off_policy.soft_values(
        off_policy.reduce_critics(target_critics(batch.next_state, following.actions)),
        following.log_probs,
        temperature,
    )
    # stable-baselines3 adds critics up and halves the sum: for two, our mean
    critic_loss = off_policy.td_loss(critics(batch.state, batch.action), batch.targets(next_values))
    drawn = draw(batch.state, golden["noise"])
    values = off_policy.reduce_critics(critics(batch.state, drawn.actions))
    actor_loss = off_policy.soft_actor_loss(values, drawn.log_probs, temperature)
    # its temperature's loss has the logarithm where ours has the temperature
    loss = off_policy.temperature_loss(log_temperature, drawn.log_probs, target_entropy=-3.0)
    (gradient,) = torch.autograd.grad(loss, log_temperature)
    found = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "ent_coef_loss": loss.detach() / temperature * log_temperature.detach(),
        "grad/log_temperature": (gradient / temperature)[None],
    }
    found |= critics.weights.gradients(critic_loss, "grad/critic")
    return found | actor.gradients(actor_loss, "grad/actor")


def _run_cql(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, target_critics = Critics(golden, "q_funcs"), Critics(golden, "targ_q_funcs")
    policy = GoldenWeights.read(golden, "policy")
    following = _draw(policy, batch.next_state, golden["next_noise"])
    next_values = off_policy.soft_values(
        off_policy.reduce_critics(target_critics(batch.next_state, following.actions)),
        following.log_probs,
        golden["log_temp/_parameter"].exp()[0, 0],
    )
    sampled, densities = [], []
    for state, noise in ((batch.state, "samples"), (batch.next_state, "next_samples")):
        draws = [_draw(policy, state, each) for each in golden[noise]]
        sampled += [draw.actions for draw in draws]
        densities += [draw.log_probs for draw in draws]
    num_rows, width = batch.action.shape
    uniform = golden["uniform"].reshape(num_rows, -1, width).transpose(0, 1)
    sampled += list(uniform)
    densities += [torch.full((num_rows,), width * math.log(0.5))] * len(uniform)
    actions = torch.stack(sampled, dim=1).detach()
    states = batch.state[:, None].expand(-1, actions.shape[1], -1)
    values = critics(batch.state, batch.action)
    gaps = off_policy.conservative_gaps(
        critics(states, actions), torch.stack(densities, dim=1), values
    )
    log_alpha = golden["log_alpha/_parameter"][0, 0].clone().requires_grad_()
    # d3rlpy: weight 5 and threshold 2 inside of the multiplier, critics added up
    conservative = 2.0 * 5.0 * log_alpha.detach().exp() * (gaps.mean() - 2.0)
    critic_loss = 2.0 * off_policy.td_loss(values, batch.targets(next_values)) + conservative
    multiplier = 5.0 * off_policy.conservative_multiplier_loss(log_alpha, gaps, threshold=2.0)
    (gradient,) = torch.autograd.grad(multiplier, log_alpha)
    found = {
        "target": next_values[:, None],
        "critic_loss": critic_loss,
        "conservative_loss": conservative,
        "grad/log_alpha/_parameter": gradient.reshape(1, 1),
    }
    return found | critics.weights.gradients(critic_loss, "grad/q_funcs")


def _run_d3rlpy_actor(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, policy = Critics(golden, "q_funcs"), GoldenWeights.read(golden, "policy")
    log_temperature = golden["log_temp/_parameter"][0, 0].clone().requires_grad_()
    drawn = _draw(policy, batch.state, golden["noise"])
    values = off_policy.reduce_critics(critics(batch.state, drawn.actions))
    actor_loss = off_policy.soft_actor_loss(values, drawn.log_probs, log_temperature.exp())
    loss = off_policy.temperature_loss(log_temperature, drawn.log_probs, target_entropy=-3.0)
    (gradient,) = torch.autograd.grad(loss, log_temperature)
    found = {
        "actor_loss": actor_loss,
        "temperature_loss": loss,
        "grad/log_temp/_parameter": gradient.reshape(1, 1),
    }
    return found | policy.gradients(actor_loss, "grad/policy")


def _run_iql(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, target_critics = Critics(golden, "q_funcs"), Critics(golden, "targ_q_funcs")
    policy, value = (GoldenWeights.read(golden, name) for name in ("policy", "value_func"))
    layers = [*D3RLPY_LAYERS, "_fc"]
    next_values = value.apply(layers, batch.next_state)[:, 0]
    q_loss = 2.0 * off_policy.td_loss(
        critics(batch.state, batch.action), batch.targets(next_values)
    )
    values = value.apply(layers, batch.state)[:, 0]
    action_values = off_policy.reduce_critics(target_critics(batch.state, batch.action))
    v_loss = off_policy.expectile_loss(values, action_values, expectile=0.8)
    # d3rlpy's mean goes through tanh, its standard deviation through a sigmoid between two bounds
    mean = torch.tanh(policy.apply([*D3RLPY_LAYERS, "_mu"], batch.state))
    log_std = -5.0 + torch.sigmoid(policy.tensors["_logstd"]) * (2.0 - -5.0)
    log_probs = off_policy.gaussian_log_probs(mean, log_std.expand_as(mean), batch.action)
    weights = off_policy.advantage_weights(
        (action_values - values).detach(), temperature=0.5, max_weight=1.5
    )
    actor_loss = off_policy.weighted_cloning_loss(-log_probs, weights)
    found = {"q_loss": q_loss, "v_loss": v_loss, "actor_loss": actor_loss}
    found |= critics.weights.gradients(q_loss, "grad/q_funcs")
    found |= value.gradients(v_loss, "grad/value_func")
    return found | policy.gradients(actor_loss, "grad/policy")


def _run_td3_bc(golden: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    critics, policy = Critics(golden, "q_funcs"), GoldenWeights.read(golden, "policy")
    action = torch.tanh(policy.apply([*D3RLPY_LAYERS, "_fc"], batch.state))
    values = off_policy.reduce_critics(critics(batch.state, action), "first")
    loss = off_policy.value_and_cloning_loss(
        values,
        off_policy.imitation_errors(action, batch.action),
        off_policy.cloning_weights(values, alpha=2.5),
    )
    return {"actor_loss": loss} | policy.gradients(loss, "grad/policy")


def _draw(policy: GoldenWeights, state: Tensor, noise: Tensor) -> off_policy.SampledActions:
    heads = ("_mu", "_logstd")
    mean, log_std = (policy.apply([*D3RLPY_LAYERS, head], state) for head in heads)
    return off_policy.sample_squashed(mean, log_std.clamp(-20.0, 2.0), noise)


def _part(golden: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    start = case + "/"
    return {
        name.removeprefix(start): value for name, value in golden.items() if name.startswith(start)
    }


def _compare(found: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> dict[str, float]:
    # a gradient that is stored and not computed here would pass unseen
    stored = {name for name in golden if "/grad/" in name or name.endswith("_loss")}
    if missing := stored - set(found):
        raise ValueError(f"not compared: {sorted(missing)}.")
    return {name: relative_difference(value, golden[name]) for name, value in found.items()}
