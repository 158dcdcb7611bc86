"""Train an MLP or a small flow policy on a small environment with any pipeline:
`python -m vla_rl.recipes.train_toy --pipeline ppo`.

`--env-id` (default: CartPole-v1) selects any gymnasium environment with a vector observation and a
discrete or bounded action, or the reaching task `vla_rl/toy_reach-v0`. The policy starts from
random weights, and a run takes a minute or less. Watch the return; with `--success-return 195`,
successes are counted too. `--policy` starts from the small flow policy that `sft_toy` wrote, which
sees images of the reaching task (`--config reach_ppo`).
"""

import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutEvaluator
from vla_rl.evaluation.held_out_schedule import HeldOutDecoding
from vla_rl.learner import CriticConfig, LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import (
    EnvSpec,
    EpisodeSpec,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    derive_seed,
)

if TYPE_CHECKING:
    from vla_rl.models.mlp import MlpPolicy
    from vla_rl.models.robot_policy import RobotPolicy


REACH = "vla_rl/toy_reach-v0"
CONTROL = "vla_rl/control-v0"


class HeldOutSeeds(HeldOutDecoding, frozen=True, kw_only=True):
    """Greedy episodes before the first update and after the last, and beside training every few
    updates if wanted, from seeds that are never trained on. Success has to be known.
    """

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf((), "starts"),
        ReadIf(("choose_starts",), "every"),
    )

    starts: NonNegativeInt = 0
    """Number of different seeds that are reported. 0: no held-out episodes."""

    choose_starts: PositiveInt | None = None
    """Number of other seeds that choose the best checkpoint, with `every`. None: as many."""


class TrainToyConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning of an MLP on a small environment."""

    run: RunConfig = RunConfig(name="train_toy", updates=30, checkpoint_every=10, videos_every=30)
    pipeline: str = "grpo"
    group_size: PositiveInt = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.2),
        micro_batch=512,
        minibatch_trajectories=8,
        epochs=2,
    )
    critic: CriticConfig = CriticConfig(
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0),
        micro_batch=512,
        minibatch_trajectories=8,
        epochs=2,
    )

    env_id: str = "CartPole-v1"
    """Gymnasium id of the environment, or vla_rl/toy_reach-v0."""

    step_limit: PositiveInt = 200
    """Control steps after which an episode is truncated."""

    step_size: PositiveFloat = 0.4
    """Reaching task only: largest move of the hand along each axis in one control step, in arena
    units from -1 to 1."""

    policy: str | None = None
    """Folder of a policy that training starts from, such as `sft_toy` writes, or a head over one, for the
    reaching task. None: an MLP with random weights."""

    num_starts: PositiveInt = 64
    """Number of different seeds that episodes start from."""

    chunk_size: PositiveInt = 1
    """Control steps in one decision; they run open loop."""

    num_bins: Annotated[int, msgspec.Meta(ge=2)] = 11
    """Values that each dimension of a continuous action can take. Discrete actions
    ignore it."""

    hidden: Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)] = (64, 64)
    """Widths of the policy's hidden layers."""

    reward_scale: float = 0.01
    """Factor for the environment's rewards; choose it so that returns are of order one."""

    success_return: float | None = None
    """Smallest unscaled return that counts as a success, such as 195 of CartPole-v1's 200. None:
    success is unknown and shown as '-'; watch the return instead."""

    held_out: HeldOutSeeds = HeldOutSeeds()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.policy is None or self.env_id == REACH,
            "policy",
            f"none, or --env-id {REACH} beside it, whose images it sees",
        )
        self.held_out.require(
            self.held_out.starts == 0 or self.env_id == REACH or self.success_return is not None,
            "starts",
            "0, or --success-return beside it: the success of an episode is unknown",
        )


def reach_arguments(step_size: float, step_limit: int) -> dict[str, Any]:
    """Return the arguments of the reaching task, which asks for the red square."""
    return {"task_id": 0, "action_dim": 2, "step_size": step_size, "step_limit": step_limit}


def env_spec(config: TrainToyConfig) -> EnvSpec:
    """Return the specification of the environment: its id and plain arguments."""
    if config.env_id == REACH:
        return EnvSpec(
            id=REACH,
            kwargs=reach_arguments(config.step_size, config.step_limit),
        )
    kwargs = {
        "env_id": config.env_id,
        "step_limit": config.step_limit,
        "reward_scale": config.reward_scale,
        "success_return": config.success_return,
    }
    return EnvSpec(id=CONTROL, kwargs=kwargs)


def training_starts(config: TrainToyConfig) -> list[TaskStart]:
    """Return one start of the environment for each seed."""
    seeds = [
        derive_seed(config.run.seed, "start", number) % 2**31 for number in range(config.num_starts)
    ]
    return [TaskStart(env=env_spec(config), task=config.env_id, seed=seed) for seed in seeds]


def held_out_episodes(config: TrainToyConfig) -> list[EpisodeSpec]:
    """Return one greedy episode from each held-out seed that is reported."""
    return _greedy_episodes(config, 0, config.held_out.starts)


def choosing_episodes(config: TrainToyConfig) -> list[EpisodeSpec]:
    """Return one greedy episode from each seed that chooses the best checkpoint."""
    first, wanted = config.held_out.starts, config.held_out.choose_starts
    return _greedy_episodes(config, first, first if wanted is None else wanted)


def _greedy_episodes(config: TrainToyConfig, first: int, num: int) -> list[EpisodeSpec]:
    """Return `num` episodes from different held-out seeds, without the `first` of them."""
    # small environments are drawn from few seeds, so that two derived ones may be equal
    used = {start.seed for start in training_starts(config)}
    drawn = (
        derive_seed(config.run.seed, "held out", number) % 2**31 for number in itertools.count()
    )
    others: dict[int, None] = {}  # in the order in which they are drawn, each once
    while len(others) < first + num:
        seed = next(drawn)
        if seed not in used:
            others[seed] = None
    seeds = itertools.islice(others, first, first + num)
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=env_spec(config),
            task=config.env_id,
            seed=seed,
            policy_seed=seed,
            sampling=config.held_out.sampling(config.temperature),
        )
        for number, seed in enumerate(seeds)
    ]


def start_policy(config: TrainToyConfig) -> "RobotPolicy | MlpPolicy":
    """Load the policy that the configuration names, or create an MLP.

    Raises: ConfigError, CheckpointError.
    """
    if config.policy is None:
        return new_policy(config)
    from vla_rl.models.loading import CheckpointFormat, load_policy

    return load_policy(config.policy, CheckpointFormat(), "cpu")


def new_policy(config: TrainToyConfig) -> "MlpPolicy":
    """Create an MLP with random weights that fits the environment.

    Raises: ConfigError if gymnasium cannot make it.
    """
    spec = env_spec(config)
    try:
        env = gymnasium.make(spec.id, **spec.kwargs)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        raise ConfigError(f"TrainToyConfig.env_id is {config.env_id!r}: {error}") from error
    seen, action = env.observation_space, env.action_space
    env.close()
    assert isinstance(seen, spaces.Dict)
    assert isinstance(action, spaces.Box)
    # the wrapped environment takes numbers; how many choices it had says the inner one alone
    inner = gymnasium.make(config.env_id).action_space if spec.id == CONTROL else action
    state_shape = seen["state"].shape
    assert state_shape is not None
    # imports torch, which `--help` does without
    from vla_rl.models.mlp import MlpConfig, MlpPolicy

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
    model = start_policy(config)
    state_bytes = 4 * (model.config.state_size or 0)
    footprint = EpisodeFootprint(
        what_runs=config.env_id,
        simulator_mb=15,
        server_mb=60,
        # a flow policy's decisions keep their images
        chunk_bytes=512 + state_bytes + (0 if config.policy is None else 4 * 1024),
        num_chunks=-(-config.step_limit // model.config.chunk_size),
    )
    held_out, chosen_by = held_out_episodes(config), choosing_episodes(config)
    evaluator = (
        HeldOutEvaluator(held_out, choose=chosen_by, schedule=config.held_out) if held_out else None
    )
    return await launch(command, training_starts(config), model, footprint, evaluator=evaluator)


cli = partial(run_recipe, TrainingLaunch, TrainToyConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
