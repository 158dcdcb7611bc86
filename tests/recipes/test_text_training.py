"""Language policies in the training loop that robots use: every pipeline runs, what pays is learnt, and a run goes on."""

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vla_rl.engines import CriticConfig, EngineConfig, LearnerConfig, OptimizerConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.observe import RunDirectory
from vla_rl.recipes import sft_text
from vla_rl.recipes.command_line import Command, Launch
from vla_rl.recipes.evaluation.validation import Validation, read_validation
from vla_rl.recipes.pipelines import with_pipeline
from vla_rl.recipes.training import Outcome, train
from vla_rl.recipes.training_config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import EnvSpec, Sampling

SHAPE = TinyConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, vocab_size=300, context_size=128)
STARTS = [TaskStart(env=EnvSpec(id="digits_task:Digits"), task="digits", seed=seed) for seed in range(4)]


def config_of(root: Path, pipeline: str, updates: int, **fields: Any) -> TextTrainingConfig:
    config = TextTrainingConfig(
        run=RunConfig(name="digits", root=str(root), updates=updates, device="cpu", checkpoint_every=100),
        group_size=8,
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=fields.pop("max_staleness", 1)),
        text=TextPoolConfig(num_envs=16),
        chat=ChatLimits(max_turns=4, max_reply=6),
        engine=EngineConfig(max_batch=16, kept_conversations=16, is_deterministic=fields.pop("deterministic", False)),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024),
        critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024, epochs=1),
    )
    return msgspec.structs.replace(with_pipeline(config, pipeline), **fields)


def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["go on"], seed=0)


async def run(config: TextTrainingConfig, **options: Any) -> Outcome:
    return await train(config, STARTS, policy(), agent=functools.partial(chat_agent, limits=config.chat), **options)


def column(outcome: Outcome, name: str) -> list[float]:
    lines = (outcome.run.path / "metrics.jsonl").read_bytes().splitlines()
    return [line[name] for line in map(msgspec.json.decode, lines) if name in line]


@pytest.mark.parametrize("pipeline", ["grpo", "ppo", "dapo", "gspo", "cpgd"])
async def test_every_pipeline_trains_a_policy_that_speaks(tmp_path: Path, pipeline: str) -> None:
    outcome = await run(config_of(tmp_path, pipeline, updates=2))
    assert outcome.progress.num_episodes >= 32
    assert max(column(outcome, "update/log_prob_gap_max"), default=0.0) < 1e-3
    assert sum(column(outcome, "update/taught")) > 0
    folder = outcome.run.checkpoints / "update-000002" / "policy"
    assert CausalLanguageModel.load(folder).context_size == 128


@pytest.mark.slow
async def test_what_pays_is_learnt_from_random_weights(tmp_path: Path) -> None:
    validation = Validation(
        STARTS, 8, functools.partial(chat_agent, limits=ChatLimits(max_reply=6)), Sampling(temperature=1.0)
    )
    outcome = await run(config_of(tmp_path, "grpo", updates=30), judge=validation)
    lines = (outcome.run.path / "validation.jsonl").read_bytes().splitlines()
    before, after = [msgspec.json.decode(line)["metrics"]["mean"] for line in lines]
    assert before < 0.25
    assert after > 0.6


async def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = await run(config_of(tmp_path, "grpo", updates=1))
    resumed = await run(config_of(tmp_path, "grpo", updates=2), resume=RunDirectory.resume(first.run.path))
    assert [int(value) for value in column(resumed, "update")] == [1, 2]


async def test_weights_are_validated_once_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    validation = Validation(STARTS[:1], 2, functools.partial(chat_agent, limits=ChatLimits(max_reply=6)), Sampling())
    config = config_of(tmp_path, "grpo", updates=1)
    first = await run(config, judge=validation)
    path = first.run.path / "validation.jsonl"
    path.write_bytes(path.read_bytes()[:-10])  # killed while it wrote the second line
    for _ in range(2):
        await run(config, judge=validation, resume=RunDirectory.resume(first.run.path))
        assert [result.weight_version for result in read_validation(path)] == [0, 1]


async def test_nothing_is_taught_where_there_is_no_place_to_save_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already, expected a new folder"):
        await sft_text.main(Command(Launch(), sft_text.SftTextConfig(out=str(tmp_path))))


async def test_a_policy_that_speaks_cannot_be_embedded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected an EmbodiedConfig"):
        await run(config_of(tmp_path, "embodied_srpo", updates=1))
