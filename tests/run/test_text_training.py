"""Language policies in the training loop that robots use: every pipeline runs, what pays is learnt,
and a run goes on.
"""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vla_rl.cli.command_line import Command, Launch
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.envs.text.arithmetic import draw_problem
from vla_rl.errors import ConfigError
from vla_rl.evaluation.validation import Validation, read_validation
from vla_rl.learner import CriticConfig, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes import sft_text
from vla_rl.recipes.grpo_text import GrpoTextConfig, training_starts, validation_starts
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.run.train import Outcome, train
from vla_rl.types import EnvSpec, Sampling

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=128,
)
STARTS = [
    TaskStart(env=EnvSpec(id="rewarded_texts:Digits"), task="digits", seed=seed)
    for seed in range(4)
]


CRITIC = CriticConfig(
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024, epochs=1
)


def config_of(root: Path, pipeline: str, updates: int, **fields: Any) -> TextTrainingConfig:
    config = TextTrainingConfig(
        run=RunConfig(
            name="digits", root=str(root), updates=updates, device="cpu", checkpoint_every=100
        ),
        group_size=8,
        scheduler=SchedulerConfig(
            groups_per_update=2, max_staleness=fields.pop("max_staleness", 1)
        ),
        text=TextPoolConfig(num_envs=16),
        chat=ChatLimits(max_turns=4, max_reply=6),
        engine=EngineConfig(
            max_batch=16, kept_conversations=16, is_deterministic=fields.pop("deterministic", False)
        ),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=1024
        ),
        critic=CRITIC if pipeline == "ppo" else CriticConfig(),
    )
    return msgspec.structs.replace(with_pipeline(config, pipeline), **fields)


def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["go on"], seed=0)


async def run(config: TextTrainingConfig, **options: Any) -> Outcome:
    return await train(
        config, STARTS, policy(), agent=functools.partial(chat_agent, limits=config.chat), **options
    )


def column(outcome: Outcome, name: str) -> list[float]:
    lines = (outcome.run.path / "metrics.jsonl").read_bytes().splitlines()
    return [line[name] for line in map(msgspec.json.decode, lines) if name in line]


# test_pipelines.py trains a robot by each of them
@pytest.mark.parametrize(
    "pipeline",
    [
        "grpo",
        "ppo",
        "dapo",
        pytest.param("gspo", marks=pytest.mark.proof),
        pytest.param("cpgd", marks=pytest.mark.proof),
    ],
)
async def test_every_pipeline_trains_a_policy_that_speaks(tmp_path: Path, pipeline: str) -> None:
    outcome = await run(config_of(tmp_path, pipeline, updates=2))
    assert outcome.progress.num_episodes >= 32
    assert max(column(outcome, "update/log_prob_gap_max"), default=0.0) < 1e-3
    assert sum(column(outcome, "update/trained")) > 0
    folder = outcome.run.checkpoints / "update-000002" / "policy"
    assert CausalLanguageModel.load(folder).context_size == 128


@pytest.mark.slow
async def test_what_pays_is_learnt_from_random_weights(tmp_path: Path) -> None:
    validation = Validation(
        STARTS,
        8,
        functools.partial(chat_agent, limits=ChatLimits(max_reply=6)),
        Sampling(temperature=1.0),
    )
    fast = LearnerConfig(
        optimizer=OptimizerConfig(lr=4e-2, warmup_steps=0), micro_batch_tokens=1024
    )
    config = config_of(tmp_path, "grpo", updates=19, learner=fast)
    outcome = await run(config, evaluator=validation)
    found = read_validation(outcome.run.path / "validation.jsonl")
    before, after = found[0]["mean"], found[19]["mean"]
    assert before < 0.25
    assert after > 0.6


async def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = await run(config_of(tmp_path, "grpo", updates=1))
    resumed = await run(
        config_of(tmp_path, "grpo", updates=2), resume=RunDirectory.resume(first.run.path)
    )
    assert [int(value) for value in column(resumed, "update")] == [1, 2]


async def test_weights_are_validated_once_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    validation = Validation(
        STARTS[:1], 2, functools.partial(chat_agent, limits=ChatLimits(max_reply=6)), Sampling()
    )
    config = config_of(tmp_path, "grpo", updates=1)
    first = await run(config, evaluator=validation)
    path = first.run.path / "validation.jsonl"
    path.write_bytes(path.read_bytes()[:-10])  # killed while it wrote the last line
    for _ in range(2):
        await run(config, evaluator=validation, resume=RunDirectory.resume(first.run.path))
        assert list(read_validation(path)) == [0, 1]


async def test_nothing_is_trained_where_there_is_no_place_to_save_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already, expected a new folder"):
        await sft_text.main(Command(Launch(), sft_text.SftTextConfig(out=str(tmp_path))))


async def test_a_policy_that_speaks_cannot_be_embedded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected an EmbodiedConfig"):
        await run(config_of(tmp_path, "embodied_srpo", updates=1))


def small_sums(**fields: Any) -> GrpoTextConfig:
    return GrpoTextConfig(
        **{"num_operators": 1, "num_digits": 1, "num_starts": 200, "num_validation": 40, **fields}
    )


def sums_of(starts: Sequence[TaskStart]) -> list[str]:
    return [
        draw_problem(
            start.seed, num_operators=1, num_digits=1, operators=start.env.kwargs["operators"]
        ).text
        for start in starts
    ]


def test_no_sum_is_trained_on_that_validation_runs_and_none_is_run_twice() -> None:
    config = small_sums()
    held_out, trained = sums_of(validation_starts(config)), sums_of(training_starts(config))
    assert (len(trained), len(held_out), len(set(held_out))) == (200, 40, 40)
    assert not set(trained) & set(held_out)


def test_too_few_different_sums_are_refused() -> None:
    # 10 x 10 sums, and of every number a from 0 to 9 the a + 1 differences that are not below 0:
    # 155 in all
    with pytest.raises(
        ConfigError, match="num_validation is 156, but only 155 different sums were found"
    ):
        validation_starts(small_sums(num_validation=156))
    with pytest.raises(
        ConfigError, match="num_validation is 155, which leaves too few sums to train on"
    ):
        training_starts(small_sums(num_validation=155))


async def test_problems_of_other_runs_are_never_put_beside_each_other(tmp_path: Path) -> None:
    agent, config = (
        functools.partial(chat_agent, limits=ChatLimits(max_reply=6)),
        config_of(tmp_path, "grpo", updates=1),
    )
    first = await run(config, evaluator=Validation(STARTS[:1], 2, agent, Sampling()))
    for evaluator, name in (
        (Validation(STARTS[:1], 3, agent, Sampling()), "num_tries is 3 now, but .* says 2"),
        (Validation(STARTS[1:2], 2, agent, Sampling()), "problems is .* now, but"),
        (
            Validation(STARTS[:1], 2, agent, Sampling(temperature=0.5)),
            "temperature is 0.5 now, but .* says 1.0",
        ),
    ):
        with pytest.raises(ConfigError, match=name):
            await run(config, evaluator=evaluator, resume=RunDirectory.resume(first.run.path))


async def test_wandb_that_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = config_of(tmp_path, "grpo", updates=1)
    config = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, wandb_project="robots")
    )
    with pytest.raises(ConfigError, match=r"install vla_rl\[wandb\] or omit the project"):
        await run(config)
    assert os.listdir(tmp_path) == []
