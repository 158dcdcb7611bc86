"""What stands beside the weights of a checkpoint goes with the policy, whatever its name.

What a language model's folder states twice has to be the same in both places.
"""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import public_checkpoint
import pytest
import torch
from pi_folders import write_lerobot, write_openpi
from small_flow import tiny_policy
from steered_bases import write_head
from tiny_smolvla import write_smolvla
from tiny_vision import write_tiny_vision

import vla_rl
from tests.test_import_arrows import statements_in
from vla_rl.engines.vllm.launch import write_folder
from vla_rl.errors import CheckpointError
from vla_rl.learner import TeamState, TrainingState, load_checkpoint, save_checkpoint
from vla_rl.models import small_files
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.models.language import TinyConfig, load_language_model
from vla_rl.models.language.tiny import write_tiny
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.models.steered import SteeredPolicy
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
    "flow": (lambda folder: tiny_policy().save(folder), load_small_flow),
    "pi0": (lambda folder: write_openpi(folder, "pi0"), FlowPolicy.load),
    "pi05": (lambda folder: write_lerobot(folder, "pi05"), FlowPolicy.load),
    "smolvla": (write_smolvla, FlowPolicy.load),
    "steered": (write_head, SteeredPolicy.load),
}


def test_every_class_that_saves_a_policy_is_among_the_families_of_these_tests() -> None:
    savers = {
        str(path.relative_to(MODELS))
        for path in MODELS.rglob("*.py")
        for node in statements_in(path.read_text())
        if isinstance(node, ast.FunctionDef) and node.name == "save"
    }
    # the tower is a run's own file, which no policy is loaded from, and the other is a protocol
    assert savers - {"trajectory_encoders.py", "robot_policy.py"} == {
        "flow/policy.py",
        "language/policy.py",
        "prismatic/policy.py",
        "mlp.py",
        "steered/policy.py",
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
    prompt = policy.render_text(QUESTION, (TOOL,))
    assert prompt.startswith("TOOLS add")
    assert not policy.render_text(QUESTION).startswith("TOOLS")
    policy.save(tmp_path / "saved")
    assert load_language_model(tmp_path / "saved").render_text(QUESTION, (TOOL,)) == prompt
    state = TrainingState(
        1,
        policy.checkpoint_tensors(),
        {"step": torch.zeros(1)},
        {"torch": torch.zeros(1)},
        policy.checkpoint_files(),
    )
    folder = await save_checkpoint(tmp_path / "run", TeamState.of_one(state), {})
    assert load_language_model(folder / "policy").render_text(QUESTION, (TOOL,)) == prompt
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
        load_language_model(folder).render_text(QUESTION, (TOOL,))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools | length }} tools"
    )
    policy = load_language_model(folder)
    assert policy.render_text(QUESTION, (TOOL,)) == "1 tools"
    policy.save(tmp_path / "saved")
    again = load_language_model(tmp_path / "saved")
    assert again.render_text(QUESTION, (TOOL,)) == "1 tools"
    assert again.render_text(QUESTION) == policy.render_text(QUESTION)


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
    both = load_language_model(folder).render_text(QUESTION, (TOOL,))
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").unlink()
    policy = load_language_model(folder)
    assert policy.render_text(QUESTION, (TOOL,)) == both
    policy.save(tmp_path / "saved")
    assert load_language_model(tmp_path / "saved").render_text(QUESTION, (TOOL,)) == both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    write_tiny(folder, SMALL, ["one two"], seed=0)
    return folder


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return write_tiny_vision(tmp_path / "seeing")


def changed(path: Path, **fields: Any) -> None:
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **fields}))


def template(folder: Path) -> str:
    return (folder / "chat_template.jinja").read_text()


def named(folder: Path, text: str, name: str = "tool_use") -> None:
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)


def ids(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return found


DIFFERENT: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "template in the tokenizer's configuration": (
        lambda folder: changed(folder / "tokenizer_config.json", chat_template="{{ messages }}"),
        r"chat template 'default' .*tokenizer_config\.json says '\{\{ messages \}\}', "
        r"chat_template\.jinja with additional_chat_templates says",
    ),
    "template in the file of older processors": (
        lambda folder: changed(folder / "chat_template.json", chat_template="{{ messages }}"),
        r"chat template 'default' .*chat_template\.json says",
    ),
    "a named template in one of them": (
        lambda folder: changed(
            folder / "tokenizer_config.json",
            chat_template=[
                {"name": "default", "template": template(folder)},
                {"name": "tool_use", "template": "{{ tools }}"},
            ],
        ),
        r"names of each chat template .*\['default', 'tool_use'\].*\['default'\]",
    ),
    "a named template that differs": (
        lambda folder: (
            named(folder, "{{ tools[0] }}"),
            changed(
                folder / "tokenizer_config.json",
                chat_template=[
                    {"name": "default", "template": template(folder)},
                    {"name": "tool_use", "template": "{{ tools }}"},
                ],
            ),
        ),
        "chat template 'tool_use'",
    ),
    "the token that ends a reply": (
        lambda folder: changed(folder / "special_tokens_map.json", eos_token="<|endoftext|>"),
        r"eos_token of .*'<\|im_end\|>'.*special_tokens_map\.json says '<\|endoftext\|>'",
    ),
    "a token's id in vocab.json": (
        lambda folder: changed(folder / "vocab.json", **{**ids(folder), "a": ids(folder)["b"]}),
        r"id of the token 'a' .*tokenizer\.json says .*vocab\.json says",
    ),
    "a token's id in added_tokens.json": (
        lambda folder: changed(folder / "added_tokens.json", **{"<|im_end|>": 299}),
        r"id of the token '<\|im_end\|>' .*added_tokens\.json says 299",
    ),
    "a token's id in the tokenizer's configuration": (
        lambda folder: changed(
            folder / "tokenizer_config.json",
            added_tokens_decoder={"299": {"content": "<|im_end|>"}},
        ),
        r"id of the token '<\|im_end\|>' .*tokenizer_config\.json says 299",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_two_files_that_say_different_things_are_refused_with_both_names(
    folder: Path, difference: str
) -> None:
    change, message = DIFFERENT[difference]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_language_model(folder)
    assert len(str(caught.value)) < 800


AGREEING: Final[dict[str, Callable[[Path], Any]]] = {
    "template in both files": lambda folder: changed(
        folder / "tokenizer_config.json", chat_template=template(folder)
    ),
    "template without its last line break": lambda folder: changed(
        folder / "tokenizer_config.json",
        chat_template=template(folder).removesuffix("\n").replace("\n", "\r\n"),
    ),
    "template in three files": lambda folder: (
        changed(folder / "tokenizer_config.json", chat_template=template(folder)),
        changed(folder / "chat_template.json", chat_template=template(folder)),
    ),
    "special tokens with properties": lambda folder: changed(
        folder / "special_tokens_map.json",
        eos_token={"content": "<|im_end|>", "lstrip": False, "rstrip": False},
    ),
    "files of slow tokenizers": lambda folder: (
        changed(folder / "vocab.json", **ids(folder)),
        changed(folder / "added_tokens.json", **{"<|im_end|>": 2}),
    ),
    "ends of a reply besides the tokenizer's": lambda folder: changed(
        folder / "generation_config.json", eos_token_id=[0, 2]
    ),
}


@pytest.mark.parametrize("agreement", AGREEING)
def test_files_that_say_the_same_are_no_error(folder: Path, agreement: str) -> None:
    AGREEING[agreement](folder)
    load_language_model(folder)


def test_a_processors_template_may_differ_from_its_tokenizers_as_in_public_models(
    seeing: Path,
) -> None:
    changed(seeing / "tokenizer_config.json", chat_template="{{ messages }}")
    load_language_model(seeing)


def test_a_processors_two_templates_have_to_be_the_same(seeing: Path) -> None:
    held = json.loads((seeing / "chat_template.json").read_text())["chat_template"]
    (seeing / "chat_template.jinja").write_text(held)
    load_language_model(seeing)
    (seeing / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="two sources of the chat template 'default'"):
        load_language_model(seeing)


def test_two_settings_of_the_same_images_have_to_be_the_same(seeing: Path) -> None:
    own = json.loads((seeing / "preprocessor_config.json").read_text())
    nested = {**own, "image_processor_type": "Qwen2VLImageProcessorFast", "new_setting": 1}
    changed(seeing / "processor_config.json", image_processor=nested)
    load_language_model(seeing)
    nested["image_mean"] = [0.5, 0.5, 0.5]
    changed(seeing / "processor_config.json", image_processor=nested)
    with pytest.raises(CheckpointError, match=r"image_mean of the images .*0\.5, 0\.5, 0\.5"):
        load_language_model(seeing)


def test_an_adapter_alone_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    with pytest.raises(CheckpointError, match=r"an adapter .* without weights.*merge_and_unload"):
        load_language_model(folder)
