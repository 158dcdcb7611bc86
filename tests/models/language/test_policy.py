"""Causal models of several families: the same numbers however they are asked, folders that transformers loads
alone, folders that cannot be used."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from made_inputs import SIZES
from tiny_vision import write_tiny_vision

from vla_rl import EnvSpec, RunConfig, TaskStart, train
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import CheckpointError, ContextOverflow
from vla_rl.models import language
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.language.tiny import write_tiny, write_tokenizer
from vla_rl.pipelines.config import TextTrainingConfig
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import Message

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


def written(folder: Path, network: Any) -> Path:
    network.save_pretrained(folder)
    write_tokenizer(folder, SHAPE, ["one two"])
    return folder


def family(name: str, folder: Path) -> CausalLanguageModel:
    torch.manual_seed(0)
    if name == "llama":
        network: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
        )
    elif name == "qwen2":
        network = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)
        )
    else:
        network = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
        )
    return CausalLanguageModel.load(written(folder, network))


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLanguageModel:
    return family(request.param, tmp_path)


def test_reading_on_in_a_slot_gives_the_logits_of_reading_all_at_once(
    policy: CausalLanguageModel,
) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    memory = policy.key_values(4)
    network: Any = policy.network
    policy.extend(memory, [2, 0, 3], [0, 0, 0], [row[:-1] for row in rows])
    found = policy.extend(memory, [2, 0, 3], [4, 1, 2], [row[-1:] for row in rows])
    for row, logits in zip(rows, found, strict=True):
        expected = network(torch.tensor([row])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_slots_are_copied_and_exchanged_with_all_that_they_hold(
    policy: CausalLanguageModel,
) -> None:
    memory = policy.key_values(3)
    alone = policy.extend(policy.key_values(1), [0], [0], [[5, 6, 7, 8]])
    policy.extend(memory, [0, 1], [0, 0], [[5, 6, 7], [9, 9, 9]])
    memory.copy_prefix(0, 2, 2)
    torch.testing.assert_close(
        policy.extend(memory, [2], [2], [[7, 8]]), alone, rtol=1e-4, atol=1e-5
    )
    memory.swap(0, 1)
    torch.testing.assert_close(policy.extend(memory, [1], [3], [[8]]), alone, rtol=1e-4, atol=1e-5)


def test_log_probs_depend_neither_on_padding_nor_on_the_rows_beside(
    policy: CausalLanguageModel,
) -> None:
    prompts = [np.array([5, 6, 7]), np.array([8]), np.array([9, 10, 11, 12, 13])]
    replies = [[20, 21], [22, 23, 24, 25], [26]]
    padded = torch.zeros(3, 4, dtype=torch.long)
    for row, reply in zip(padded, replies, strict=True):
        row[: len(reply)] = torch.tensor(reply)
    batch = policy.prepare([{"prompt_tokens": prompt} for prompt in prompts])
    together, _ = policy.log_probs(batch, padded, torch.tensor([1.0, 0.5, 2.0]))
    network: Any = policy.network
    for number, (prompt, reply, temperature) in enumerate(
        zip(prompts, replies, (1.0, 0.5, 2.0), strict=True)
    ):
        logits = network(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, dim=-1).gather(
            1, torch.tensor(reply)[:, None]
        )[:, 0]
        torch.testing.assert_close(together[number, : len(reply)], expected, rtol=1e-4, atol=1e-5)


def test_features_are_those_of_each_prompts_last_token(policy: CausalLanguageModel) -> None:
    prompts = [np.array([5, 6, 7]), np.array([8])]
    together = policy.features(policy.prepare([{"prompt_tokens": prompt} for prompt in prompts]))
    alone = policy.features(policy.prepare([{"prompt_tokens": prompts[1]}]))
    assert together.shape == (2, policy.feature_size)
    torch.testing.assert_close(together[1], alone[0], rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_loaded_by_transformers_alone_and_by_us(
    policy: CausalLanguageModel, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    policy.save(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    own: Any = policy.network
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(network(tokens).logits, own(tokens).logits)
    assert tokenizer.chat_template
    again = CausalLanguageModel.load(folder)
    assert again.checkpoint_tensors().keys() == policy.checkpoint_tensors().keys()


def test_tied_weights_are_saved_once_and_loaded_into_both(tmp_path: Path) -> None:
    policy = family("qwen2", tmp_path)
    tensors = {name: tensor + 1.0 for name, tensor in policy.checkpoint_tensors().items()}
    assert "lm_head.weight" not in tensors
    policy.load_checkpoint_tensors(tensors)
    network: Any = policy.network
    torch.testing.assert_close(network.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_tensors_of_another_model_are_refused_by_name() -> None:
    policy = tiny(SHAPE, ["a"], seed=0)
    tensors = policy.checkpoint_tensors()
    tensors["extra"] = tensors.pop("model.norm.weight")
    with pytest.raises(
        CheckpointError, match=r"missing \['model.norm.weight'\], unknown \['extra'\]"
    ):
        policy.load_checkpoint_tensors(tensors)


def test_a_copy_learns_without_the_original() -> None:
    policy = tiny(SHAPE, ["a"], seed=0)
    other = policy.copy()
    with torch.no_grad():
        next(other.network.parameters()).add_(1.0)
    assert not torch.equal(next(other.network.parameters()), next(policy.network.parameters()))


def test_layers_that_forget_are_refused(tmp_path: Path) -> None:
    sliding = transformers.MistralConfig(**SIZES, sliding_window=8)
    folder = written(tmp_path, transformers.MistralForCausalLM(sliding))
    with pytest.raises(CheckpointError, match=r"sliding window of 8, expected full attention"):
        CausalLanguageModel.load(folder)


def test_a_reply_ends_at_the_models_own_token_if_its_generation_names_none(tmp_path: Path) -> None:
    folder = written(tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    own = CausalLanguageModel.load(folder).stop_tokens
    assert 2 in own
    (folder / "generation_config.json").write_text("{}")
    assert CausalLanguageModel.load(folder).stop_tokens == own


class Hub:
    """A stand-in for the hub's client, which copies what is not ignored."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self._repository, self._cache = repository, cache

    def snapshot_download(self, hub_id: str, *, ignore_patterns: list[str]) -> str:
        names = [
            path.relative_to(self._repository).as_posix()
            for path in self._repository.rglob("*")
            if path.is_file()
        ]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            (self._cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._repository / name, self._cache / name)
        return str(self._cache)


def test_every_small_file_comes_from_the_hub_and_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    repository = written(tmp_path / "repository", network)
    small = {"additional_chat_templates/tool_use.jinja", "USE_POLICY.md", "tomorrow.cfg"}
    large = {
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "training_args.bin",
        "optimizer.pt",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "rollouts/one.mp4",
    }
    for name in small | large:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("{{ tools }}")
    hub = Hub(repository, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    policy = CausalLanguageModel.load("somebody/tiny")
    fetched = {
        path.relative_to(tmp_path / "cache").as_posix()
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file()
    }
    assert small <= fetched
    assert not fetched & large
    assert small <= policy.checkpoint_files().keys()


def test_a_folder_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is neither a folder nor a GGUF file"):
        CausalLanguageModel.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"holds no weights; expected model\.safetensors"):
        CausalLanguageModel.load(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no weights; expected model\.safetensors"):
        CausalLanguageModel.load(tmp_path)
    (tmp_path / "checkpoints" / "update-000012" / "policy").mkdir(parents=True)
    (tmp_path / "checkpoints" / "update-000012" / "policy" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is of a training run .* Name it .*-000012/policy$"):
        CausalLanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    ("observation", "fault"),
    [
        ({}, r"expected int64 \[P\] with P >= 1"),
        ({"prompt_tokens": np.zeros(0, np.int64)}, r"expected int64 \[P\]"),
        ({"prompt_tokens": np.array([1.5])}, r"float64 \[1\]"),
        ({"prompt_tokens": np.array([300])}, r"holds token 300, expected 0 to 299"),
    ],
)
def test_an_observation_that_is_no_prompt_is_refused(
    observation: dict[str, Any], fault: str
) -> None:
    policy = tiny(SHAPE, ["a"], seed=0)
    with pytest.raises(ValueError, match=fault):
        policy.prepare([observation])


PAGE = Path(__file__).parents[3] / "docs" / "language.md"


def test_the_page_makes_a_policy_and_speaks_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    converses, fills_in, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(converses, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    num_prompt = len(
        names["policy"].render(
            [names["Message"](role="user", content="What is 3+4?")], [names["calc"]]
        )
    )
    assert printed.startswith(f"{num_prompt} (16,) (16,) length\n")
    exec(compile(fills_in, str(PAGE), "exec"), names)
    assert re.match(r"(Saturday|Sunday) -\d+\.\d+ %llguidance", capsys.readouterr().out)


async def test_the_page_shows_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n# look\.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, str(PAGE), "exec"), names)
    await names["look"](str(write_tiny_vision(tmp_path / "tiny")))
    # 112 x 168 pixels are 4 x 6 tokens, after the role and the mark before an image
    assert re.match(r"\d+ \(\d+,\) ", capsys.readouterr().out)


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
