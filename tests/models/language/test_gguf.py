"""A GGUF file is a policy like any folder: converted once, whole, and to the numbers that it holds."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quantization, GGUFWriter, quantize
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError
from vla_rl.models import language
from vla_rl.models.language import TinyConfig, gguf
from vla_rl.models.language.checkpoint import local_folder
from vla_rl.models.language.tiny import write_tiny
from vla_rl.types import Message
from vla_rl.util.atomic_files import FolderWriter

TEXTS = ("What is 12+7?", "  hello   world\n\n 42", "don't stop at 1,024 or 3.5")
SIZE = TinyConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=96,
    vocab_size=400,
    context_size=128,
)
BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which nothing is converted or installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return gguf.cache_folder()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama."""
    folder = tmp_path_factory.mktemp("original")
    write_tiny(folder, SIZE, [*TEXTS, "0123456789+-=?"] * 8, seed=3)
    return folder


def write_gguf(
    folder: Path,
    file: Path,
    kind: Quantization = Quantization.F32,
    *,
    architecture: str = "llama",
    rule: str = "smollm",
    without: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write a folder as llama.cpp's converter lays it out; return the tensors that the file holds."""
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer = GGUFWriter(file, architecture)
    config = network.config
    # llama.cpp's converter fills the list up to the rows of the table.
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config.vocab_size)]
    writer.add_name("a small model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    if "eos" not in without:
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    if "template" not in without:
        writer.add_chat_template((folder / "chat_template.jinja").read_text())
    held = {}
    for name, tensor in network.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        array = tensor.numpy()
        is_matrix = array.ndim == 2
        stored = _permuted(array, config.num_attention_heads) if _is_rotary(name) else array
        blocks = quantize(stored, kind) if is_matrix else stored
        writer.add_tensor(_name(name), blocks, raw_dtype=kind if is_matrix else None)
        held[name] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _is_rotary(name: str) -> bool:
    return "q_proj" in name or "k_proj" in name


def _permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a rotary projection in llama.cpp's order: pairs beside each other."""
    halves = array.reshape(heads, 2, -1, array.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, number, *rest, last = name.split(".")
    return f"blk.{number}.{BLOCK['.'.join(rest)]}.{last}"


def logits(policy: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = policy.network(torch.arange(20)[None]).logits
    return found


def test_a_file_is_the_policy_that_it_was_made_from(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "small.gguf")
    read = language.load_language_model(str(tmp_path / "small.gguf"))
    before = language.load_language_model(original)
    assert torch.equal(logits(read), logits(before))
    question = [Message(role="user", content=TEXTS[0])]
    assert read.render_text(question) == before.render_text(question)
    assert read.stop_tokens == before.stop_tokens
    assert read.context_size == SIZE.context_size


@pytest.mark.parametrize(
    ("kind", "step"), [(Quantization.Q8_0, 1 / 127), (Quantization.Q4_1, 1 / 15), (Quantization.BF16, 1 / 128)]
)  # fmt: skip
def test_quantised_weights_are_within_a_step_of_the_original(
    kind: Quantization, step: float, original: Path, tmp_path: Path
) -> None:
    held = write_gguf(original, tmp_path / "small.gguf", kind)
    read = language.load_language_model(str(tmp_path / "small.gguf")).checkpoint_tensors()
    for name, array in held.items():
        assert np.abs(read[name].numpy() - array).max() <= step * np.abs(array).max(), name
        assert read[name].dtype is torch.float32


def test_digits_are_cut_off_first_where_the_rule_of_the_file_says_so(
    original: Path, tmp_path: Path
) -> None:
    write_gguf(original, tmp_path / "small.gguf", rule="smollm")
    folder = gguf.open_gguf(tmp_path / "small.gguf")
    read = transformers.AutoTokenizer.from_pretrained(folder)
    pieces = read.backend_tokenizer.pre_tokenizer.pre_tokenize_str("world\n\n 42")
    assert [piece for piece, _ in pieces] == ["world", "ĊĊĠ", "4", "2"]


def test_a_rule_that_nobody_knows_is_said(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(original, tmp_path / "small.gguf", rule="klingon")
    gguf.open_gguf(tmp_path / "small.gguf")
    assert "cuts text by the rule 'klingon', which is not known here" in caplog.text


def test_what_was_trained_is_saved_as_an_ordinary_checkpoint(
    original: Path, tmp_path: Path
) -> None:
    write_gguf(original, tmp_path / "small.gguf")
    policy = language.load_language_model(str(tmp_path / "small.gguf"))
    with torch.no_grad():
        next(policy.network.parameters()).mul_(2)
    policy.save(tmp_path / "trained")
    again = language.load_language_model(tmp_path / "trained")
    assert torch.equal(logits(again), logits(policy))
    assert "quantization_config" not in json.loads((tmp_path / "trained/config.json").read_bytes())


def test_a_file_is_converted_once_and_another_of_its_name_gets_its_own_folder(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.gguf"
    (tmp_path / "small").mkdir()  # a folder of the same name is another policy
    write_gguf(original, file)
    first = gguf.open_gguf(file)
    assert f"{file} is converted to {first}, once" in capsys.readouterr().out
    assert gguf.open_gguf(file) == first
    assert capsys.readouterr().out == ""
    write_gguf(original, file, Quantization.Q8_0)
    assert gguf.open_gguf(file) != first


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_one_error(share: float, original: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(original, file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"small\.gguf .*download it again"):
        language.load_language_model(str(file))
    assert not list(gguf.cache_folder().glob("*"))


def test_a_file_with_damaged_bytes_is_read_or_is_one_error(original: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(original, file)
    whole, random = file.read_bytes(), np.random.default_rng(0)
    for _ in range(12):
        damaged = bytearray(whole)
        for at in random.integers(4, 6000, size=3):  # header and table of tensors
            damaged[at] = random.integers(256)
        file.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            language.load_language_model(str(file))


def test_weights_that_are_not_finite_are_refused(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    write_gguf(tmp_path / "nan", tmp_path / "small.gguf")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* not finite"):
        language.load_language_model(str(tmp_path / "small.gguf"))


def test_what_transformers_does_not_read_is_named(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "small.gguf", architecture="grok")
    with pytest.raises(CheckpointError, match=r"architecture grok"):
        language.load_language_model(str(tmp_path / "small.gguf"))


@pytest.mark.parametrize(
    ("left_out", "named"), [("template", "chat template"), ("eos", "token that ends a reply")]
)
def test_a_file_without_what_a_conversation_needs_is_refused(
    left_out: str, named: str, original: Path, tmp_path: Path
) -> None:
    write_gguf(original, tmp_path / "small.gguf", without=(left_out,))
    with pytest.raises(CheckpointError, match=named):
        language.load_language_model(str(tmp_path / "small.gguf"))


def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        language.load_language_model(str(tmp_path / "page.gguf"))
    with pytest.raises(CheckpointError, match=r"absent\.gguf cannot be read: No such file"):
        language.load_language_model(str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize("name", ["small.GGUF", "sha256-9f2c"])
def test_a_file_is_known_by_how_it_begins_whatever_its_name(
    name: str, original: Path, tmp_path: Path
) -> None:
    write_gguf(original, tmp_path / name)
    folder = local_folder(str(tmp_path / name))
    assert folder.name.startswith(f"{name.removesuffix('.GGUF')}-")


def test_a_folder_of_gguf_files_names_them(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "small.gguf")
    with pytest.raises(CheckpointError, match=r"name one of them: .*small\.gguf"):
        language.load_language_model(tmp_path)


def test_without_room_on_the_disk_nothing_is_left(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    write_gguf(original, tmp_path / "small.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"bytes are needed and 1,000 are free"):
        language.load_language_model(str(tmp_path / "small.gguf"))
    assert not list(cache.iterdir())


def embeddings(policy: Any) -> torch.Tensor:
    found: torch.Tensor = policy.checkpoint_tensors()["model.embed_tokens.weight"]
    return found


def test_a_file_and_a_folder_that_are_named_alike_are_told_apart_by_the_suffix(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    write_tiny(tmp_path / "policy", SIZE, TEXTS, seed=4)
    write_gguf(original, tmp_path / "policy.gguf")
    folder = embeddings(language.load_language_model("policy"))
    file = embeddings(language.load_language_model("policy.gguf"))
    assert torch.equal(file, embeddings(language.load_language_model(original)))
    assert not torch.equal(folder, file)
    (tmp_path / "policy.gguf").unlink()
    (tmp_path / "policy").rename(tmp_path / "policy.gguf")  # a folder, whatever its name
    assert torch.equal(embeddings(language.load_language_model("policy.gguf")), folder)


def test_a_disk_that_fills_up_while_a_file_is_converted_leaves_nothing(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    write_gguf(original, tmp_path / "small.gguf")

    def fill(self: FolderWriter, name: str, tensors: Any) -> None:
        self.new_path(name).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FolderWriter, "write_tensors", fill)
        with pytest.raises(CheckpointError, match="No space left on device"):
            language.load_language_model(str(tmp_path / "small.gguf"))
    assert not list(cache.iterdir())
    language.load_language_model(str(tmp_path / "small.gguf"))


def test_a_killed_conversion_is_done_again(original: Path, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(original, file)
    program = (
        "import os, signal; from pathlib import Path; from vla_rl.models.language import gguf\n"
        "from vla_rl.util.atomic_files import FolderWriter\n"
        "FolderWriter.write_bytes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"gguf.open_gguf(Path({str(file)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    (half,) = cache.iterdir()
    assert half.name.startswith(".writing-small-")
    language.load_language_model(str(file))
    assert [path.name for path in cache.iterdir()] == [gguf.open_gguf(file).name]


def test_the_installed_model_and_a_folder_of_its_name_are_told_apart(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="run `vla-rl install smollm2`"):
        language.load_language_model("smollm2")
    write_gguf(original, tmp_path / "small.gguf")
    gguf.convert_gguf(tmp_path / "small.gguf", cache / "smollm2")
    installed = language.load_language_model("smollm2")
    assert installed.context_size == SIZE.context_size
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(CheckpointError, match=r"write \./smollm2"):
        language.load_language_model("smollm2")
