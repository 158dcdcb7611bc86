"""A language policy learns from your own questions and answers:

    python -m vla_rl.recipes.grpo_prompts --policy Qwen/Qwen3-0.6B --prompts questions.jsonl --scorer math

The policy gives one reply to each question, which is scored against the row's answer
(`vla_rl.scoring` has the scorers). Some rows are held out for validation before the first update
and after the last. Every row is checked before anything starts; an error names the row that lacks a
field, has an empty question, or does not fit the policy's context.
"""

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.datasets.image_files import row_messages
from vla_rl.datasets.prompts import read_prompts
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig, make_text_task
from vla_rl.errors import ConfigError, DataError
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.scoring import check_answer, check_scorer, fields_read
from vla_rl.types import (
    EnvSpec,
    Message,
    NonNegativeInt,
    PositiveInt,
    Sampling,
    derive_seed,
)
from vla_rl.util.values import excerpt

if TYPE_CHECKING:
    from vla_rl.engines import LanguageModel


ENV_ID = "text/question"


class GrpoPromptsConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a language policy on the rows of a file."""

    run: RunConfig = RunConfig(name="grpo_prompts", updates=100, checkpoint_every=20)
    group_size: PositiveInt = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    text: TextPoolConfig = TextPoolConfig(num_envs=64)
    chat: ChatLimits = ChatLimits(max_turns=1)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=16, max_reply=512)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.2),
        micro_batch=32,
        micro_batch_tokens=8192,
    )

    policy: str = "Qwen/Qwen3-0.6B"
    """Folder or hub id of the checkpoint to start from: any causal language model with a chat
    template."""

    prompts: str = "prompts.jsonl"
    """A .jsonl or .parquet file with one question per row."""

    scorer: str = "math"
    """exact, match, math, code, or your own function as "module:function":
    `def f(reply: str, row: dict) -> float`."""

    prompt_field: str = "prompt"
    """Field with the question: a text, or a list of messages with role and content."""

    answer_field: str = "answer"
    """Field with the answer that the scorer compares with."""

    image_field: str = ""
    """Field with the images of a question: the path of a file, from the folder of `prompts`, or a list of
    paths. Empty: questions are text alone. It needs a policy that reads images."""

    system: str = ""
    """System message at the start of each conversation, such as the format of an answer. Empty:
    none."""

    num_validation: NonNegativeInt | None = None
    """Rows held out from training, for validation before the first update and after the last. None: 64,
    of fewer than 320 rows a fifth; 0: none."""

    num_tries: PositiveInt = 4
    """Episodes of each held-out row."""

    def unused_options(self) -> Mapping[str, str]:
        """Return options that nothing reads, as every configuration does."""
        unused = {"num_tries": "num_validation is 0"} if self.num_validation == 0 else {}
        return {**super().unused_options(), **unused}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row needs."""
        return fields_read(self.scorer, self.prompt_field, self.answer_field)

    @property
    def max_reply(self) -> int:
        """Maximum number of tokens in a reply."""
        return min(self.engine.max_reply, self.chat.max_reply or self.engine.max_reply)


def split_rows(config: GrpoPromptsConfig) -> tuple[list[int], list[int]]:
    """Return the row numbers to train on and those that are held out, drawn by the run's seed.

    Raises: DataError for a file that cannot be read, a row without a field, or too few rows.
    """
    rows = list(range(len(read_prompts(config.prompts, config.columns))))
    num_held_out = config.num_validation
    if num_held_out is None:
        num_held_out = min(64, len(rows) // 5)
    if len(rows) <= num_held_out:
        raise DataError(
            f"{config.prompts} has {len(rows)} rows and num_validation={num_held_out} of "
            "them are held out, which leaves none to train on; hold out fewer, or add rows"
        )
    # shuffled, because files are often sorted by difficulty or source, and sorted again so that a
    # table of rows reads as the file does
    random.Random(derive_seed(config.run.seed, "held-out rows")).shuffle(rows)
    return sorted(rows[num_held_out:]), sorted(rows[:num_held_out])


def row_starts(config: GrpoPromptsConfig, numbers: Sequence[int]) -> list[TaskStart]:
    """Return one start for each row. Raises: ConfigError if there is no such scorer, or module of one."""
    kwargs = {
        "data": config.prompts,
        "scorer": config.scorer,
        "prompt_field": config.prompt_field,
        "answer_field": config.answer_field,
        "system": config.system,
        "image_field": config.image_field,
    }
    env = EnvSpec(id=ENV_ID, kwargs=kwargs)
    # made once in this process: a scorer or a file that is wrong would otherwise fail in the first
    # episode
    make_text_task(env)
    return [
        TaskStart(env=env, task=Path(config.prompts).stem, options={"row": number})
        for number in numbers
    ]


class LongestPrompt(NamedTuple):
    """The longest of all prompts.

    Example:
        LongestPrompt(num_tokens=85, image_sizes=((112, 168),))
    """

    num_tokens: int
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Height and width of each image that it shows."""


def check_prompts(config: GrpoPromptsConfig, model: "LanguageModel[Any]") -> LongestPrompt:
    """Check every row; return the longest prompt. A reply that finds little room is cut short.

    Raises: DataError, with row and field, for a prompt that is neither text nor messages, is empty,
    is rejected by the chat template, or fills the policy's context, for an image that cannot be read,
    and for an answer that the scorer cannot compare with; ConfigError if the chat template rejects the
    system message, or the policy reads no images.
    """
    if config.image_field and not isinstance(model, language.VisionLanguageModel):
        raise ConfigError(
            f"image_field is {config.image_field!r}, but {type(model).__name__} reads text alone; "
            "take a policy with a vision tower, such as Qwen/Qwen3-VL-2B-Instruct"
        )
    rows = read_prompts(config.prompts, config.columns)
    longest = LongestPrompt(0)
    for number, row in enumerate(rows):
        # every row is rendered, as one that does not fit would end the run whenever its turn comes
        found = _check_row(config, model, row, f"row {number} of {config.prompts}")
        longest = max(longest, found, key=lambda each: each.num_tokens)
    return longest


def _check_row(
    config: GrpoPromptsConfig, model: "LanguageModel[Any]", row: dict[str, Any], label: str
) -> LongestPrompt:
    prompt = f"{config.prompt_field!r} of {label}"
    folder = Path(config.prompts).parent
    asked = row_messages(row, config.prompt_field, "", label, config.image_field, folder)
    images = [image for message in asked for image in message.images]
    if not any(message.content.strip() for message in asked):
        raise DataError(f"{prompt} is empty, expected a question; leave the row out")
    if len(images) > config.engine.max_images:
        raise DataError(
            f"{label} shows {len(images)} images, expected at most engine.max_images = "
            f"{config.engine.max_images}; raise it, or leave the row out"
        )
    system = (Message(role="system", content=config.system),) if config.system else ()
    try:
        num_tokens = len(model.render((*system, *asked)))
    except ValueError as error:
        if config.system and _accepts_messages(model, asked):
            raise ConfigError(
                f"system={excerpt(config.system)}: {error}. The template takes {prompt} without "
                "it; write what it says into the questions, or use a template that takes it"
            ) from error
        raise DataError(
            f"{prompt}: {error}; leave the row out, or use roles that the chat template knows"
        ) from error
    try:
        check_answer(config.scorer, row, config.answer_field)
    except DataError as error:
        raise DataError(f"{config.answer_field!r} of {label}: {error}") from error
    context = min(model.context_size, config.engine.max_context or model.context_size)
    if num_tokens >= context:
        raise DataError(
            f"{prompt} has {num_tokens} tokens and the context {context}, expected room for at "
            "least one token of a reply; leave the row out, or use a policy with a longer "
            "context"
        )
    return LongestPrompt(num_tokens, tuple(image.shape[:2] for image in images))


def _accepts_messages(model: "LanguageModel[Any]", messages: Sequence[Message]) -> bool:
    try:
        model.render(messages)
    except ValueError:
        return False
    return True


async def main(command: Command[TrainingLaunch, GrpoPromptsConfig]) -> int:
    """Check the rows; plan, draw or train, as the command line says."""
    config = command.config
    trained, held_out = await asyncio.to_thread(split_rows, config)
    starts = row_starts(config, trained)
    await check_scorer(config.scorer, config.text.sandbox)
    model = await asyncio.to_thread(language.load_language_model, config.policy)
    longest = await asyncio.to_thread(check_prompts, config, model)
    print(
        f"{len(trained)} rows to train on, {len(held_out)} held out; the longest prompt has "
        f"{longest.num_tokens} tokens",
        flush=True,
    )
    footprint = EpisodeFootprint(
        what_runs=ENV_ID,
        simulator_mb=0,
        server_mb=0,
        # tokens, log-probs and what the trainer adds to each
        chunk_bytes=16 * (longest.num_tokens + config.max_reply)
        + sum(3 * height * width for height, width in longest.image_sizes),
        num_chunks=1,
        observation_tokens=longest.num_tokens,
        observation_images=longest.image_sizes,
    )
    evaluator = None
    if held_out:
        agent = partial(chat_agent, limits=config.chat)
        sampling = Sampling(temperature=config.temperature)
        evaluator = Validation(row_starts(config, held_out), config.num_tries, agent, sampling)
    return await launch(command, starts, model, footprint, evaluator=evaluator)


cli = partial(run_recipe, TrainingLaunch, GrpoPromptsConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
