"""Folders and prompts that a language policy cannot use: each is one error, or is made do with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl import EnvSpec, RunConfig, TaskStart, train
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import CheckpointError, ContextOverflow
from vla_rl.models import language
from vla_rl.models.language import TinyConfig
from vla_rl.models.language.tiny import write_tiny
from vla_rl.pipelines.config import TextTrainingConfig
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import Message

SIZE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=64,
)
QUESTION = [Message(role="user", content="1 2 3")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a small policy."""
    (tmp_path / "policy").mkdir()
    write_tiny(tmp_path / "policy", SIZE, ["1 2 3"], seed=0)
    return tmp_path / "policy"


def forget(folder: Path, name: str) -> None:
    """Take a special token out of every file that names it."""
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / file).read_bytes())
        for key in (name, f"{name}_id"):
            settings.pop(key, None)
        (folder / file).write_text(json.dumps(settings))


def test_a_policy_without_a_padding_token_computes_what_it_would_with_one(folder: Path) -> None:
    before = language.load_language_model(folder)
    forget(folder, "pad_token")
    policy = language.load_language_model(folder)
    replies = torch.tensor([[5, 6, 7], [8, 0, 0]])  # the second is shorter, and is padded
    found = []
    for each in (before, policy):
        prompts = [each.render(QUESTION), each.render(QUESTION)[:-2]]
        batch = each.prepare([{"prompt_tokens": prompt, "grammars": ()} for prompt in prompts])
        found.append(each.log_probs(batch, replies, torch.ones(2))[0])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("name", "what"), [("config.json", "configuration"), ("tokenizer.json", "tokenizer")]
)
def test_a_file_that_is_missing_beside_the_weights_is_named(
    name: str, what: str, folder: Path
) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"policy has no {what} \({name}\)"):
        language.load_language_model(folder)


def test_a_policy_without_a_name_is_not_this_folder() -> None:
    with pytest.raises(CheckpointError, match="the policy is an empty text, expected a folder"):
        language.load_language_model("")


def test_a_policy_whose_replies_would_never_end_is_refused_with_its_folder(folder: Path) -> None:
    forget(folder, "eos_token")
    with pytest.raises(CheckpointError, match=rf"{folder}.* names no eos_token_id"):
        language.load_language_model(folder)


def run_talkative(folder: Path, root: Path, **kwargs: int) -> Any:
    config = TextTrainingConfig(
        run=RunConfig(updates=1, root=str(root), device="cpu"),
        group_size=2,
        text=TextPoolConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=1),
        engine=EngineConfig(max_reply=4),
    )
    env = EnvSpec(id="sample_tasks:TalkativeTask", kwargs=kwargs)
    return train(config, [TaskStart(env=env, task="talk")], language.load_language_model(folder))


async def test_a_first_prompt_that_never_fits_ends_the_run_with_its_length_and_episode(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ContextOverflow, match=r"the prompt has \d+ tokens and the context 64, expected room"
    ) as failure:
        await run_talkative(folder, tmp_path / "runs", first=100, later=1)
    assert "while running episode 0 (talk, member 0 of group 0" in failure.value.__notes__[0]


async def test_a_later_prompt_that_outgrows_the_context_ends_its_episode_alone(
    folder: Path, tmp_path: Path
) -> None:
    outcome = await run_talkative(folder, tmp_path / "runs", first=3, later=100)
    assert outcome.progress.num_episodes == 2
    (line,) = read_metrics(outcome.run.path / "metrics.jsonl")
    assert line["rollout/stopped/token_limit"] == 2
