"""Train a small language policy that half knows a task:
`python -m vla_rl.recipes.sft_text --out base`.

Supervised learning from random weights on conversations about sums that contain mistakes
(`arithmetic_mix`); the tokenizer is trained on the same conversations. The result is the base
policy that `grpo_text` improves, in Hugging Face's layout. It takes minutes on one core.
`--task arithmetic_pair` uses conversations of both agents of `grpo_pair` (`pair_mix`).
`--task sums --policy smollm2` shows a model that exists how the calculator of `grpo_sums` is called.
`--task requests` shows a planner plans for what `grpo_planner` asks.
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from vla_rl import engines
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.text import sums
from vla_rl.envs.text.arithmetic import check_difficulty
from vla_rl.envs.text.arithmetic_conversations import (
    TOOLS,
    draw_conversation,
    draw_pair_conversation,
)
from vla_rl.errors import ConfigError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.models.loading import require_new_folder
from vla_rl.recipes.request_plans import demonstrate_plan, list_planner_tools
from vla_rl.run.supervised import train_supervised
from vla_rl.types import Config, Message, PositiveInt, ReadIf, ToolSpec, derive_seed

if TYPE_CHECKING:
    from vla_rl.learner import Demonstration
    from vla_rl.models.language import CausalLanguageModel


NUM_TOKENIZER_TEXTS = 500
DRAWN: Final = ("arithmetic", "arithmetic_pair")
"""Tasks whose conversations are drawn with mistakes."""


class SftTextConfig(Config, frozen=True, kw_only=True):
    """Supervised learning of a small language policy."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("num_operators", "num_digits", "operators"), "task", DRAWN),
        ReadIf(("mistakes",), "task", (*DRAWN, "requests")),
        ReadIf(("shape",), "policy", ("none",)),
    )

    out: str = "base"
    """Folder that the checkpoint is written to. It must not exist yet."""

    seed: int = 0
    """Seed of the weights and the conversations."""

    shape: TinyConfig = TinyConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=256,
        vocab_size=512,
        context_size=256,
    )
    """Sizes of the network. Heads of 32 dimensions are the smallest that vLLM's CPU kernels
    support."""

    policy: str = "none"
    """smollm2, or the folder, GGUF file or hub id of a causal language model with a chat template
    that is trained further. none: a new one of the size `shape`."""

    task: Literal["arithmetic", "arithmetic_pair", "sums", "requests"] = "arithmetic"
    """arithmetic: one agent solves sums, for `grpo_text`; arithmetic_pair: a solver and a checker,
    for `grpo_pair`; sums: one call of the calculator and the right answer, for `grpo_sums`; requests: a
    planner calls a robot, for `grpo_planner`."""

    num_operators: int = 2
    """Operations in a sum: at most as many as in the environment."""

    num_digits: int = 1
    """Digits of each number in a sum."""

    operators: str = "+-"
    """Operators to draw from."""

    mistakes: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.35
    """Probability of a mistake in a turn."""

    updates: PositiveInt = 4000
    """Optimizer steps."""

    batch: PositiveInt = 8
    """Conversations in one optimizer step; each is used once. Many small steps train better than
    few large ones."""

    print_every: PositiveInt = 100
    """Updates between two printed lines with the loss."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(
            lr=4e-3, warmup_steps=50, decay_steps=4000, betas=(0.9, 0.98), weight_decay=0.01
        ),
        micro_batch=32,
    )

    torch_threads: PositiveInt = 1
    """Threads for the computation on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_difficulty(self.num_operators, self.num_digits, self.operators)
        except ValueError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None


def make_conversation(config: SftTextConfig, number: int) -> tuple[Message, ...]:
    """Make the conversation of this number."""
    seed = derive_seed(config.seed, "conversation", number)
    if config.task == "sums":
        return sums.demonstrate_sum(seed)
    if config.task == "requests":
        return demonstrate_plan(seed, config.mistakes)
    made = draw_pair_conversation if config.task == "arithmetic_pair" else draw_conversation
    return made(
        seed,
        num_operators=config.num_operators,
        num_digits=config.num_digits,
        operators=config.operators,
        mistakes=config.mistakes,
    )


def list_tools(config: SftTextConfig) -> Sequence[ToolSpec]:
    """Return the tools that the environment of the task describes to the policy."""
    if config.task == "requests":
        return list_planner_tools()
    return sums.TOOLS if config.task == "sums" else TOOLS


def open_policy(config: SftTextConfig) -> "CausalLanguageModel":
    """Open the policy that is trained further, or create one."""
    if config.policy == "none":
        return new_policy(config)
    return language.load_language_model(config.policy)


def new_policy(config: SftTextConfig) -> "CausalLanguageModel":
    """Create a policy with random weights and a tokenizer that is trained on such conversations."""
    # a blank policy renders the texts that the tokenizer is made from, in the template that it will
    # get
    blank = tiny(config.shape, (), config.seed)
    texts = [
        blank.render_text(make_conversation(config, number), list_tools(config))
        for number in range(NUM_TOKENIZER_TEXTS)
    ]
    return tiny(config.shape, texts, config.seed)


async def train_policy(config: SftTextConfig, policy: "CausalLanguageModel") -> int:
    """Make all updates and save the weights; return the exit status."""
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.run.supervised import opened_imitator

    async with (
        engines.DeviceLane(config.torch_threads) as lane,
        opened_imitator(
            policy, lane, config.imitation, seed=derive_seed(config.seed, "ranks")
        ) as imitator,
    ):

        async def batch(number: int) -> "list[Demonstration]":
            # drawn anew for each update: there are more conversations than any run can read
            first = (number - 1) * config.batch
            chats = [
                make_conversation(config, number) for number in range(first, first + config.batch)
            ]
            return await asyncio.to_thread(_make_batch, policy, chats, list_tools(config))

        async def learn(number: int, sft_batch: "list[Demonstration]") -> None:
            loss = (await imitator.train_step(sft_batch)).metrics["imitation/loss"]
            if number % config.print_every == 0 or number == config.updates:
                print(f"update {number}: loss {loss:.3f}", flush=True)

        async def save(folder: Path) -> None:
            await imitator.fetch_weights()
            await lane.run(policy.save, folder, work="checkpoint")

        return await train_supervised(
            config.updates, batch, learn, save, Path(config.out), description="training"
        )


def _make_batch(
    policy: "CausalLanguageModel",
    chats: Sequence[Sequence[Message]],
    tools: Sequence[ToolSpec],
) -> "list[Demonstration]":
    from vla_rl.models.language.policy import chat_demonstration

    return [chat_demonstration(policy, chat, tools) for chat in chats]


async def main(command: Command[Launch, SftTextConfig]) -> int:
    """Train the policy and save it; return the exit status."""
    config = command.config
    require_new_folder(Path(config.out))
    policy = open_policy(config)
    num_parameters = sum(parameter.numel() for parameter in policy.network.parameters())
    prompt = policy.render(make_conversation(config, 0)[:1], list_tools(config))
    print(
        f"{num_parameters} parameters, {len(prompt)} tokens per prompt; the policy will be saved "
        f"in {config.out}",
        flush=True,
    )
    if command.launch.dry_run:
        return 0
    return await train_policy(config, policy)


cli = partial(run_recipe, Launch, SftTextConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
