"""What stands beside the weights of a checkpoint goes with the policy, whatever its name."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import public_checkpoint
import pytest
import torch
from statements import statements_in
from tiny_vision import write_tiny_vision

import vla_rl
from vla_rl.engines.vllm.launch import write_folder
from vla_rl.learner import TeamState, TrainingState, load_checkpoint, save_checkpoint
from vla_rl.models import small_files
from vla_rl.models.language import TinyConfig, load_language_model
from vla_rl.models.language.tiny import write_tiny
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.models.vllm import serve
from vla_rl.types import Message, ToolSpec

SMALL = TinyConfig(
    hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, vocab_size=300, context_size=64
)
SHAPE = MlpConfig(state_size=3, action_low=(-1.0,), action_high=(1.0,), num_bins=5, chunk_size=2)
MODELS = Path(vla_rl.__file__).parent / "models"
TOOL = ToolSpec(name="add", description="Add numbers.", parameters={"type": "object"})
QUESTION = (Message(role="user", content="one two"),)


def write_text(folder: Path) -> None:
    folder.mkdir()
    write_tiny(folder, SMALL, ["one two"], seed=0)


def write_public(folder: Path) -> None:
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)


FAMILIES: Final[dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]] = {
    "language": (write_text, load_language_model),
    "vision": (write_tiny_vision, load_language_model),
    "openvla": (write_public, lambda folder: OpenVla.load(folder, norm_key="libero_goal")),
    "mlp": (lambda folder: MlpPolicy.create(SHAPE, seed=0).save(folder), MlpPolicy.load),
}


def test_every_class_that_saves_a_policy_is_among_the_families_of_these_tests() -> None:
    savers = {
        str(path.relative_to(MODELS))
        for path in MODELS.rglob("*.py")
        for node in statements_in(path.read_text())
        if isinstance(node, ast.FunctionDef) and node.name == "save"
    }
    # the tower is a run's own file, which no policy is loaded from
    assert savers - {"trajectory_encoders.py"} == {
        "language/policy.py",
        "prismatic/policy.py",
        "mlp.py",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_small_file_is_carried_into_what_is_saved(family: str, tmp_path: Path) -> None:
    write, load = FAMILIES[family]
    folder = tmp_path / "loaded"
    write(folder)
    (folder / "manifest.json").unlink(missing_ok=True)  # the folder is changed on purpose
    carried = {
        "LICENSE": b"free",
        "USE_POLICY.md": b"be kind",
        "a_file_of_tomorrow.cfg": b"\xff\x00",
        "additional_chat_templates/short.jinja": b"{{ messages[0].content }}",
        "more/deeper/notes.txt": b"\xe9",
    }
    left = {
        "pytorch_model.bin.index.json": b'{"weight_map": {}}',
        "optimizer.pt.bin": b"x",
        "tf_model.h5": b"x",
        ".cache/huggingface/download/config.json.metadata": b"x",
        "lora/adapter_model.safetensors": b"x",
        "lora/notes.txt": b"x",
        "other_model/config.json": b"{}",
    }
    if family != "language":
        del carried["additional_chat_templates/short.jinja"]
    for name, data in {**carried, **left}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    before = {path.name for path in folder.iterdir() if path.is_file()}
    load(folder).save(tmp_path / "saved")
    saved = tmp_path / "saved"
    assert {name: (saved / name).read_bytes() for name in carried} == carried
    assert not [name for name in left if (saved / name).exists()]
    kept = {
        name for name in before if not name.endswith((".safetensors", ".index.json", ".h5", ".bin"))
    }
    assert kept <= {path.name for path in saved.iterdir()}
    load(saved)


def test_what_is_too_large_stays_behind_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small_files, "COMPANION_BYTES", 100)
    monkeypatch.setattr(small_files, "SUBFOLDER_BYTES", 100)
    (tmp_path / "movies").mkdir()
    (tmp_path / "movies" / "a.dat").write_bytes(b"x" * 101)
    (tmp_path / "large.dat").write_bytes(b"x" * 101)
    (tmp_path / "small.dat").write_bytes(b"x" * 100)
    assert small_files.companion_files(tmp_path) == {"small.dat": b"x" * 100}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("large.dat, movies/ of")
    assert "stays behind" in line


def with_named_templates(folder: Path) -> None:
    write_text(folder)
    default = (folder / "chat_template.jinja").read_text()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "TOOLS {% for tool in tools %}{{ tool.function.name }}{% endfor %} " + default
    )
    (folder / "chat_template.jinja").write_text(default.replace("if tools or", "if"))


async def test_the_prompt_with_tools_is_the_same_after_saving_and_in_a_runs_checkpoint(
    tmp_path: Path,
) -> None:
    with_named_templates(tmp_path / "loaded")
    policy = load_language_model(tmp_path / "loaded")
    prompt = policy.text_of(QUESTION, (TOOL,))
    assert prompt.startswith("TOOLS add")
    assert not policy.text_of(QUESTION).startswith("TOOLS")
    policy.save(tmp_path / "saved")
    assert load_language_model(tmp_path / "saved").text_of(QUESTION, (TOOL,)) == prompt
    state = TrainingState(
        1,
        policy.checkpoint_tensors(),
        {"step": torch.zeros(1)},
        {"torch": torch.zeros(1)},
        policy.checkpoint_files(),
    )
    folder = await save_checkpoint(tmp_path / "run", TeamState.of_one(state), {})
    assert load_language_model(folder / "policy").text_of(QUESTION, (TOOL,)) == prompt
    # what a resume saves again has it too
    again = (await load_checkpoint(folder)).state.only.policy_files
    assert again == dict(policy.checkpoint_files())


def test_an_engine_is_given_the_named_templates(tmp_path: Path) -> None:
    with_named_templates(tmp_path / "loaded")
    served = serve(load_language_model(tmp_path / "loaded"))
    (tmp_path / "engine").mkdir()
    write_folder(tmp_path / "engine", served.layout)
    inner = "additional_chat_templates/tool_use.jinja"
    assert (tmp_path / "engine" / inner).read_bytes() == (tmp_path / "loaded" / inner).read_bytes()


# transformers leaves the files of a processor's named templates open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_processor_with_named_templates_describes_tools(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "loaded")
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="describes none"):
        load_language_model(folder).text_of(QUESTION, (TOOL,))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools | length }} tools"
    )
    policy = load_language_model(folder)
    assert policy.text_of(QUESTION, (TOOL,)) == "1 tools"
    policy.save(tmp_path / "saved")
    again = load_language_model(tmp_path / "saved")
    assert again.text_of(QUESTION, (TOOL,)) == "1 tools"
    assert again.text_of(QUESTION) == policy.text_of(QUESTION)


def test_templates_in_the_list_of_older_versions_are_carried_too(tmp_path: Path) -> None:
    with_named_templates(tmp_path / "loaded")
    folder = tmp_path / "loaded"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": (folder / "chat_template.jinja").read_text()},
        {
            "name": "tool_use",
            "template": (folder / "additional_chat_templates" / "tool_use.jinja").read_text(),
        },
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    both = load_language_model(folder).text_of(QUESTION, (TOOL,))
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").unlink()
    policy = load_language_model(folder)
    assert policy.text_of(QUESTION, (TOOL,)) == both
    policy.save(tmp_path / "saved")
    assert load_language_model(tmp_path / "saved").text_of(QUESTION, (TOOL,)) == both
