"""A vision-language agent learns to answer questions about images:
`python -m vla_rl.recipes.grpo_squares`.

Each episode shows an image with squares, or what a driver sees, and asks for a side, a colour, a
number or a traffic light; the right word earns 1. With several images the question comes again with
each. No simulator is started: any checkpoint of Qwen2.5-VL, Qwen3-VL or SmolVLM is
trained, its vision tower too unless it is frozen.
"""

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig, make_text_task
from vla_rl.envs.text.scenes import SCENES
from vla_rl.errors import ConfigError
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import (
    EnvSpec,
    Message,
    NonNegativeInt,
    PositiveInt,
    ReadIf,
    Sampling,
    derive_seed,
)

if TYPE_CHECKING:
    from vla_rl.models.language import VisionLanguageModel


ENV_ID = "text/square"


class GrpoSquaresConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a vision-language policy on questions about images."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("num_tries",), "num_validation"),)

    run: RunConfig = RunConfig(name="grpo_squares", updates=40, checkpoint_every=20)
    group_size: PositiveInt = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    text: TextPoolConfig = TextPoolConfig(num_envs=64)
    chat: ChatLimits = ChatLimits(max_turns=1)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=16, max_reply=16)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.2),
        micro_batch=32,
        micro_batch_tokens=8192,
    )

    policy: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    """Folder or hub id of the checkpoint to start from: a Qwen2.5-VL, Qwen3-VL or SmolVLM."""

    question: Literal["side", "colour", "count", "light"] = "side"
    """side: is the square on the left or on the right; colour: which of four colours it has; count: are
    there one, two, three or four squares; light: is the traffic light ahead red or green."""

    num_images: PositiveInt = 1
    """Images of an episode, one a turn, each with the question; needs as many `chat.max_turns`."""

    size: Annotated[int, msgspec.Meta(ge=8)] = 112
    """Height and width of the images in pixels; at least 56 for "light"."""

    freeze_vision: bool = False
    """Whether the vision tower keeps its weights; otherwise it is trained with the rest."""

    num_starts: PositiveInt = 4096
    """Images to train on."""

    num_validation: NonNegativeInt = 64
    """Other images, for validation before the first update and after the last. 0: none."""

    num_tries: PositiveInt = 4
    """Episodes of each validation image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.num_images <= self.chat.max_turns,
            "num_images",
            f"at most chat.max_turns = {self.chat.max_turns}, because each image is a turn",
        )

    @property
    def env(self) -> EnvSpec:
        """Specification of the environment."""
        more = {"num_images": self.num_images} if self.num_images > 1 else {}
        return EnvSpec(id=ENV_ID, kwargs={"question": self.question, "size": self.size, **more})

    @property
    def max_reply(self) -> int:
        """Maximum number of tokens in a reply."""
        return min(self.engine.max_reply, self.chat.max_reply or self.engine.max_reply)


def split_starts(config: GrpoSquaresConfig) -> tuple[list[TaskStart], list[TaskStart]]:
    """Return the images to train on, and those of validation, drawn by the run's seed."""
    seeds = _different_seeds(config)
    held_out = [_make_start(config, seed) for seed in islice(seeds, config.num_validation)]
    return [_make_start(config, seed) for seed in islice(seeds, config.num_starts)], held_out


def _different_seeds(config: GrpoSquaresConfig) -> Iterator[int]:
    number, seen = 0, set[int]()
    while True:
        # two starts of one seed would be one image, in training and held out
        seed = derive_seed(config.run.seed, "image", number) % 2**31
        if seed not in seen:
            yield seed
        seen.add(seed)
        number += 1


def _make_start(config: GrpoSquaresConfig, seed: int) -> TaskStart:
    return TaskStart(env=config.env, task=f"{ENV_ID} {config.question}", seed=seed)


def load_vision_policy(config: GrpoSquaresConfig) -> "VisionLanguageModel":
    """Load the policy. Raises: ConfigError if it reads text alone; CheckpointError."""
    model = language.load_language_model(config.policy)
    if not isinstance(model, language.VisionLanguageModel):
        raise ConfigError(
            f"policy is {config.policy}, a {type(model).__name__} that reads text alone; expected a "
            "checkpoint with a vision tower, such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    if config.freeze_vision:
        model.freeze_vision()
    return model


def episode_footprint(config: GrpoSquaresConfig, model: "VisionLanguageModel") -> EpisodeFootprint:
    """Return what an episode needs: its images, a question for each, and replies."""
    scene = SCENES[config.question]
    image = scene.draw(0, config.size).image
    asked = Message(role="user", images=(image,), content=scene.asked)
    # each turn shows the images before it again; only the first has the template's beginning
    num_prompt_tokens = config.num_images * len(model.render([asked]))
    return EpisodeFootprint(
        what_runs=ENV_ID,
        simulator_mb=0,
        server_mb=0,
        chunk_bytes=config.num_images * image.nbytes
        + 16 * (num_prompt_tokens + config.num_images * config.max_reply),
        num_chunks=config.num_images,
        observation_tokens=num_prompt_tokens,
        observation_images=((config.size, config.size),) * config.num_images,
    )


async def main(command: Command[TrainingLaunch, GrpoSquaresConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    make_text_task(config.env)
    trained, held_out = split_starts(config)
    model = await asyncio.to_thread(load_vision_policy, config)
    evaluator = None
    if held_out:
        agent = partial(chat_agent, limits=config.chat)
        sampling = Sampling(temperature=config.temperature)
        evaluator = Validation(held_out, config.num_tries, agent, sampling)
    return await launch(
        command, trained, model, episode_footprint(config, model), evaluator=evaluator
    )


cli = partial(run_recipe, TrainingLaunch, GrpoSquaresConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
