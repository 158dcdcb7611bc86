"""Any pipeline on a small environment with an MLP policy: `python -m vla_rl.recipes.train_toy --pipeline ppo`.

`--env-id` (default: CartPole-v1) is any gymnasium environment with a vector observation and a discrete or bounded action, or
the reaching task `vla_rl/toy_reach-v0`. The policy starts from random weights. A run takes a minute or less. Judge it by its
return; with `--success-return 195` it counts successes too.
"""

import sys

import gymnasium
import numpy as np
from gymnasium import spaces

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.commands.command_line import Command, TrainingLaunch, run_recipe
from vla_rl.commands.launching import launch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.errors import ConfigError
from vla_rl.learning import CriticConfig, LearnerConfig, OptimizerConfig
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import EnvSpec, derive_seed

REACH = "vla_rl/toy_reach-v0"
CONTROL = "vla_rl/control-v0"


class TrainToyConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning of an MLP on a small environment."""

    run: RunConfig = RunConfig(name="train_toy", updates=30, checkpoint_every=10, videos_every=30)
    pipeline: str = "grpo"
    group_size: int = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0), micro_batch=512, minibatch_trajectories=8, epochs=2
    )
    critic: CriticConfig = CriticConfig(
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0), micro_batch=512, minibatch_trajectories=8, epochs=2
    )

    env_id: str = "CartPole-v1"
    """Gymnasium's id of the environment, or vla_rl/toy_reach-v0."""

    step_limit: int = 200
    """Control steps after which an episode is cut off."""

    num_starts: int = 64
    """Different seeds that episodes start from."""

    chunk_size: int = 1
    """Control steps in one decision, run open loop."""

    num_bins: int = 11
    """Values that each number of a continuous action can take; a discrete action has as many as it has choices."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the policy's hidden layers."""

    reward_scale: float = 0.01
    """What the environment's rewards are multiplied with, so that returns are of order one."""

    success_return: float | None = None
    """Return, before scaling, from which an episode counts as a success, such as 195 of CartPole-v1's 200. None: success is
    unknown, shown as '-', and the run is judged by its return."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("step_limit", "num_starts", "chunk_size"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.num_bins >= 2, "num_bins", "at least 2")


def env_of(config: TrainToyConfig) -> EnvSpec:
    """The environment by name and plain values."""
    if config.env_id == REACH:
        return EnvSpec(
            id=REACH, kwargs={"task_id": 0, "action_dim": 2, "step_size": 0.4, "step_limit": config.step_limit}
        )
    kwargs = {
        "env_id": config.env_id,
        "step_limit": config.step_limit,
        "reward_scale": config.reward_scale,
        "success_return": config.success_return,
    }
    return EnvSpec(id=CONTROL, kwargs=kwargs)


def starts_of(config: TrainToyConfig) -> list[TaskStart]:
    """The environment from every seed."""
    seeds = [derive_seed(config.run.seed, "start", number) % 2**31 for number in range(config.num_starts)]
    return [TaskStart(env=env_of(config), task=config.env_id, seed=seed) for seed in seeds]


def policy_of(config: TrainToyConfig) -> MlpPolicy:
    """An MLP with random weights that fits the environment. Raises: ConfigError where none does."""
    spec = env_of(config)
    try:
        env = gymnasium.make(spec.id, **spec.kwargs)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        raise ConfigError(f"TrainToyConfig.env_id is {config.env_id!r}: {error}") from error
    seen, action = env.observation_space, env.action_space
    env.close()
    assert isinstance(seen, spaces.Dict)
    assert isinstance(action, spaces.Box)
    inner = gymnasium.make(config.env_id).action_space if spec.id == CONTROL else action
    state_shape = seen["state"].shape
    assert state_shape is not None
    shape = MlpConfig(
        state_size=int(np.prod(state_shape)),
        action_low=tuple(action.low.tolist()),
        action_high=tuple(action.high.tolist()),
        num_bins=int(inner.n) if isinstance(inner, spaces.Discrete) else config.num_bins,
        chunk_size=config.chunk_size,
        hidden=config.hidden,
    )
    return MlpPolicy.create(shape, seed=derive_seed(config.run.seed, "policy"))


async def main(command: Command[TrainingLaunch, TrainToyConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    model = policy_of(config)
    footprint = EpisodeFootprint(
        what_runs=config.env_id,
        simulator_mb=15,
        server_mb=60,
        chunk_bytes=512 + 4 * model.config.state_size,
        num_chunks=-(-config.step_limit // config.chunk_size),
    )
    return await launch(command, starts_of(config), model, footprint)


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, TrainToyConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
