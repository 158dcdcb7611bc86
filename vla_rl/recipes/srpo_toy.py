"""SRPO on a toy reaching task, in two minutes and without LIBERO:
`python -m vla_rl.recipes.srpo_toy`.

It has the graph, processes, policy architecture and learner of `srpo_libero`, on a cheap reaching
task: move a hand into the square of the colour that the instruction names. The policy starts from
random weights, and its success rate rises within minutes.
"""

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import msgspec

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.envs.toy import NUM_INIT_STATES
from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutEvaluator, parse_numbers
from vla_rl.evaluation.held_out_schedule import HeldOutDecoding, choosing_numbers
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import openvla_oft
from vla_rl.models.openvla_oft import tiny
from vla_rl.pipelines.config import EmbodiedConfig, RunConfig
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import (
    EnvSpec,
    EpisodeSpec,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    derive_seed,
)

if TYPE_CHECKING:
    from vla_rl.models.openvla_oft import OpenVlaOft


ACTION_DIM = 2
NUM_BINS = 16
"""Values of each action dimension. They are few and coarse, so that a random policy reaches a
square now and then."""

STEP_SIZE = 0.25
"""Distance of a full action. Small enough that the hand lands in a square more often than it jumps
over it: with 0.4, a policy that ignores the image and still explores succeeds in at most 55 % of
its episodes."""


class HeldOutReaches(HeldOutDecoding, frozen=True, kw_only=True):
    """Greedy episodes before the first update and after the last, and beside training every few
    updates if wanted, from starts that are never trained on.
    """

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf((), "init_states"),
        ReadIf(("choose_init_states",), "every"),
    )

    init_states: str | None = None
    """Numbers of the starts of each colour that are reported, such as 20-29. None: no held-out
    episodes."""

    choose_init_states: str | None = None
    """Numbers of the starts of each colour that choose the best checkpoint, with `every`. None: as
    many as are reported, the next ones that are not trained on."""


class SrpoToyConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """SRPO on the reaching task."""

    run: RunConfig = RunConfig(name="srpo_toy", updates=24, checkpoint_every=8, videos_every=12)
    pipeline: str = "embodied_srpo"
    group_size: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    embedding: EmbeddingConfig = EmbeddingConfig(encoder="state")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=4, decay_steps=24),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        entropy_coef=0.01,
    )

    task_ids: tuple[int, ...] = (0,)
    """Colours to reach: 0 is red, 1 green, 2 blue, 3 yellow."""

    init_states: tuple[int, ...] = (11, 17, 18, 30)
    """Numbers of the starts to use, 0 to 49. In the default ones the red square is in the same
    corner, about as far away along x as along y, so minutes of training are enough; for others the
    policy must use the image and the instruction."""

    chunk_size: int = 4
    """Control steps in one action chunk."""

    step_limit: int = 12
    """Control steps after which an episode is a failure."""

    held_out: HeldOutReaches = HeldOutReaches()

    def __post_init__(self) -> None:
        super().__post_init__()
        held_out_episodes(self)
        choosing_episodes(self)


def colour_env(config: SrpoToyConfig, task_id: int) -> EnvSpec:
    """Return the specification of the environment that asks for one colour."""
    return EnvSpec(
        id="vla_rl/toy_reach-v0",
        kwargs={
            "task_id": task_id,
            "action_dim": ACTION_DIM,
            "step_size": STEP_SIZE,
            "step_limit": config.step_limit,
        },
    )


def training_starts(config: SrpoToyConfig) -> list[TaskStart]:
    """Return every colour from every start."""
    return [
        TaskStart(
            env=colour_env(config, task_id),
            task=f"toy_reach/{task_id}",
            options={"init_state_id": state},
        )
        for task_id in config.task_ids
        for state in config.init_states
    ]


def held_out_episodes(config: SrpoToyConfig) -> list[EpisodeSpec]:
    """Return every colour from every held-out start, once.

    Raises: ConfigError if a start is trained on or does not exist.
    """
    return _greedy_episodes(config, _report_numbers(config))


def choosing_episodes(config: SrpoToyConfig) -> list[EpisodeSpec]:
    """Return every colour from every start that chooses the best checkpoint, once; none without
    evaluations beside training.

    Raises: ConfigError if a start is reported, trained on or does not exist.
    """
    reported = _report_numbers(config)
    if config.held_out.every is None or not reported:
        return []
    text = config.held_out.choose_init_states
    return _greedy_episodes(
        config, choosing_numbers(text, reported, config.init_states, NUM_INIT_STATES)
    )


def _report_numbers(config: SrpoToyConfig) -> tuple[int, ...]:
    wanted = config.held_out.init_states
    if wanted is None:
        return ()
    states = parse_numbers(wanted, NUM_INIT_STATES, "held_out.init_states")
    # a list and no first number, unlike LIBERO's starts: any of the starts may be trained on
    if trained := sorted(set(states) & set(config.init_states)):
        raise ConfigError(
            f"held_out.init_states are {wanted!r}, but {trained} are trained on; expected others "
            f"than init_states"
        )
    return states


def _greedy_episodes(config: SrpoToyConfig, states: Sequence[int]) -> list[EpisodeSpec]:
    sampling = config.held_out.sampling(config.temperature)
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=colour_env(config, task_id),
            task=f"toy_reach/{task_id}",
            seed=0,
            policy_seed=derive_seed(config.run.seed, "held out", number),
            options={"init_state_id": state},
            sampling=sampling,
        )
        for number, (task_id, state) in enumerate(itertools.product(config.task_ids, states))
    ]


def new_policy(config: SrpoToyConfig) -> "OpenVlaOft":
    """Create a small OpenVLA-OFT with random weights and one camera."""
    shape = tiny(
        image_size=28,
        cameras=("image",),
        proprio=None,
        chunk_size=config.chunk_size,
        action_dim=ACTION_DIM,
    )
    shape = msgspec.structs.replace(shape, num_bins=NUM_BINS)
    return openvla_oft.OpenVlaOft.create(shape, seed=derive_seed(config.run.seed, "policy"))


async def main(command: Command[TrainingLaunch, SrpoToyConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    model, held_out = new_policy(config), held_out_episodes(config)
    return await launch(
        command,
        training_starts(config),
        model,
        EpisodeFootprint(
            what_runs="vla_rl/toy_reach-v0",
            simulator_mb=15,
            server_mb=60,
            chunk_bytes=3 * 32 * 32 + 512,
            num_chunks=-(-config.step_limit // config.chunk_size),
        ),
        evaluator=HeldOutEvaluator(
            held_out, choose=choosing_episodes(config), schedule=config.held_out
        )
        if held_out
        else None,
    )


cli = partial(run_recipe, TrainingLaunch, SrpoToyConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
