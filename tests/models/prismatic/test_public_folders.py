"""What a public folder may bring: code, damage, a hub's links, statistics twice, more than there is
room for.
"""

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_checkpoint
import numpy as np
import public_checkpoint
import pytest
import torch
from golden_checkpoint import HEAD, PROPRIO

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models import tensor_reading
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import CONVENTIONS, ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic import weights
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.util.atomic_files import MANIFEST

HUB_ID, REVISION = "somebody/openvla-7b-tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "openvla"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


@pytest.fixture
def public_folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "openvla")


def load(public_folder: Path | str) -> OpenVla:
    return OpenVla.load(public_folder, norm_key="libero_goal")


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_code_in_a_folder_is_carried_along_and_never_run(
    public_folder: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "was run"
    code = f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n"
    for name in (
        "modeling_prismatic.py",
        "configuration_prismatic.py",
        "processing_prismatic.py",
        "__init__.py",
    ):
        (public_folder / name).write_text(code)
    load(public_folder).save(tmp_path / "ours")
    assert not trap.exists()
    assert (tmp_path / "ours" / "modeling_prismatic.py").read_text() == code


def test_statistics_in_two_files_have_to_be_the_same(public_folder: Path) -> None:
    other = public_checkpoint.statistics()
    rounded = np.asarray(other["action"]["q01"], np.float32).tolist()
    assert rounded != other["action"]["q01"]
    same = {**other, "action": {**other["action"], "q01": rounded}}
    changed(public_folder / "config.json", norm_stats={"libero_goal_no_noops": same})
    assert load(public_folder).config.action_bounds.low[0] == pytest.approx(-0.1)
    other["action"]["q01"] = [-0.5] * 7
    both = {"libero_goal_no_noops": other, "bridge_orig": other}
    changed(public_folder / "config.json", norm_stats=both)
    with pytest.raises(
        CheckpointError,
        match=r"two sources of q01 of action in the statistics 'libero_goal_no_noops' say different "
        r"things: .*dataset_statistics\.json says \[-0\.1.*config\.json says \[-0\.5",
    ):
        load(public_folder)
    # another set that only one file has can be used
    assert OpenVla.load(public_folder, norm_key="bridge_orig").config.action_bounds.low[0] == -0.5
    (public_folder / "dataset_statistics.json").unlink()
    assert load(public_folder).config.action_bounds.low[0] == -0.5


def test_a_constant_state_is_scaled_as_the_public_evaluation_has_it_and_as_a_policy_was_saved(
    public_folder: Path, tmp_path: Path
) -> None:
    public_checkpoint.Parts(seed=0).write_parts(public_folder)
    policy = ContinuousOpenVlaOft.load(public_folder, norm_key="libero_goal")
    policy.save(tmp_path / "ours")
    ours = ContinuousOpenVlaOft.load(tmp_path / "ours")
    assert policy.config.proprio == ours.config.proprio
    assert policy.config.proprio is not None
    assert policy.config.proprio.constant == "ends"
    extension = json.loads((tmp_path / "ours" / "vla_rl.json").read_text())
    del extension["proprio_constant"]  # a folder from before it was written down
    (tmp_path / "ours" / "vla_rl.json").write_text(json.dumps(extension))
    (tmp_path / "ours" / MANIFEST).unlink()
    assert ContinuousOpenVlaOft.load(tmp_path / "ours").config.proprio.constant == "zero"


def test_a_state_that_is_scaled_in_part_is_refused(public_folder: Path) -> None:
    public_checkpoint.Parts(seed=0).write_parts(public_folder)
    statistics = public_checkpoint.statistics()
    statistics["proprio"]["mask"] = [True] * 7 + [False]
    (public_folder / "dataset_statistics.json").write_text(
        json.dumps({"libero_goal_no_noops": statistics})
    )
    with pytest.raises(
        CheckpointError, match=r"the proprio statistics have the mask \(True, .* False\)"
    ):
        ContinuousOpenVlaOft.load(public_folder, norm_key="libero_goal")


def test_a_device_without_room_is_named_before_anything_is_read(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights.psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000)
    )
    monkeypatch.setattr(weights, "_all_tensors", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(
        CheckpointError,
        match=r"the weights need 0\.0 GB, but 0\.0 GB are available; choose another device",
    ):
        load(public_folder)


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("config.json", b"no-align"),
        ("model.safetensors.index.json", b"vision_backbone"),
        ("dataset_statistics.json", b"libero_goal"),
        ("vla_rl.json", b"featurizer"),
    ],
)
def test_a_file_whose_bytes_are_no_text_is_named(
    file: str, word: bytes, public_folder: Path
) -> None:
    whole = (public_folder / file).read_bytes()
    (public_folder / file).write_bytes(whole.replace(word, b"\xff" + word[1:], 1))
    with pytest.raises(CheckpointError, match=file):
        load(public_folder)


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        ({"rope_theta": 500000.0}, r"text_config\.rope_theta is 500000\.0, expected 10000\.0"),
        ({"num_key_value_heads": 1}, r"text_config\.num_key_value_heads is 1, expected 2"),
        ({"hidden_act": "gelu"}, r"text_config\.hidden_act is 'gelu', expected 'silu'"),
        ({"model_type": "mistral"}, r"text_config\.model_type is 'mistral', expected 'llama'"),
    ],
)
def test_a_trunk_that_would_compute_otherwise_is_refused(
    text_config: dict[str, Any], message: str, public_folder: Path
) -> None:
    config = json.loads((public_folder / "config.json").read_text())
    changed(public_folder / "config.json", text_config={**config["text_config"], **text_config})
    with pytest.raises(CheckpointError, match=message):
        load(public_folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500_000.0}),
        ("partial_rotary_factor", 0.5),
        ("tie_word_embeddings", True),
        ("a_field_of_tomorrow", 3),
    ],
)
def test_a_field_of_the_trunk_that_is_not_read_is_refused_by_its_name(
    name: str, value: Any, public_folder: Path
) -> None:
    text = json.loads((public_folder / "config.json").read_text())["text_config"]
    changed(public_folder / "config.json", text_config={**text, name: value})
    with pytest.raises(CheckpointError, match=rf"text_config\.{name} is .*Llama's default"):
        load(public_folder)


def test_a_trunks_configuration_that_transformers_writes_out_is_taken(public_folder: Path) -> None:
    import transformers

    text = json.loads((public_folder / "config.json").read_text())["text_config"]
    whole = transformers.LlamaConfig(**text).to_dict()
    older = {"rope_scaling": None, "rope_theta": 10000.0, "temperature": 1.0, "top_k": 50}
    changed(public_folder / "config.json", text_config={**whole, **older})
    load(public_folder)


def test_ids_of_tokens_in_two_files_have_to_be_the_same(public_folder: Path) -> None:
    padding = public_checkpoint.VOCABULARY
    (public_folder / "added_tokens.json").write_text(json.dumps({"<PAD>": padding}))
    load(public_folder)
    (public_folder / "added_tokens.json").write_text(json.dumps({"<PAD>": padding + 1}))
    with pytest.raises(CheckpointError, match="id of the token '<PAD>'"):
        load(public_folder)


def test_a_tower_that_timm_does_not_know_is_named(public_folder: Path) -> None:
    changed(
        public_folder / "config.json",
        timm_model_ids=["vit_of_nobody", "vit_so400m_patch14_siglip_224"],
    )
    with pytest.raises(ConfigError, match="timm cannot build the vision tower 'vit_of_nobody'"):
        load(public_folder)


@pytest.fixture
def hub(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as the hub's client keeps it: files under their digests, and links to them from
    a snapshot.
    """
    import huggingface_hub.constants

    root = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / REVISION, root / "blobs"
    for path in (snapshot, blobs, root / "refs"):
        path.mkdir(parents=True)
    (root / "refs" / "main").write_text(REVISION)
    for file in written.iterdir():
        data = file.read_bytes()
        is_large = file.suffix in (".safetensors", ".pt")
        blob = blobs / (hashlib.sha256 if is_large else hashlib.sha1)(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file.name).symlink_to(blob)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id_that_was_fetched_before_is_read_from_its_folder(
    hub: Path, written: Path, tmp_path: Path
) -> None:
    policy, expected = load(HUB_ID), load(written).checkpoint_tensors()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in policy.checkpoint_tensors().items()
    )
    policy.save(tmp_path / "ours")
    assert (tmp_path / "ours" / "config.json").read_bytes() == (
        written / "config.json"
    ).read_bytes()


def test_a_bit_that_flipped_in_a_file_of_the_hub_is_found(hub: Path) -> None:
    blob = next(hub.glob("*.safetensors")).resolve()
    damaged = bytearray(blob.read_bytes())
    damaged[-3] ^= 1
    blob.write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=r"differs from what was published .* remove .* and fetch it again"
    ):
        load(HUB_ID)


def test_a_bit_that_flipped_in_a_part_of_the_hub_is_found(hub: Path) -> None:
    public_checkpoint.Parts(seed=0).write_parts(hub)
    for part in list(hub.glob("*.pt")):
        blob = hub.parents[1] / "blobs" / hashlib.sha256(part.read_bytes()).hexdigest()
        shutil.move(part, blob)
        part.symlink_to(blob)
    ContinuousOpenVlaOft.load(HUB_ID, norm_key="libero_goal")
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="differs from what was published"):
        ContinuousOpenVlaOft.load(HUB_ID, norm_key="libero_goal")


def test_frames_that_are_enlarged_are_said_once_and_empty_ones_refused(
    public_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(public_folder)
    small = {"image": np.zeros((13, 28, 3), np.uint8), "instruction": "push"}
    with caplog.at_level(logging.WARNING):
        policy.prepare([small])
        policy.prepare([small])
    assert [
        record.getMessage() for record in caplog.records if "enlarged" in record.getMessage()
    ] == [
        "frames of 13 x 28 pixels are enlarged to 28 x 28, so the policy sees blurred images; "
        "render larger ones unless "
        "it was trained with these."
    ]
    with pytest.raises(
        ValueError,
        match=r"observation\['image'\] is uint8 \[0, 28, 3\], expected uint8 \[H, W, 3\]",
    ):
        policy.prepare([{"image": np.zeros((0, 28, 3), np.uint8), "instruction": "push"}])


PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What stands after all snippets ran."""
    names: dict[str, Any] = {}
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
    ):
        exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "tiny"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


def test_a_public_checkpoint_is_loaded_adapted_merged_and_saved(
    page: dict[str, Any], public: Path, tmp_path: Path
) -> None:
    policy = page["load_mine"](public)
    adapted = page["with_adapters"](policy)
    assert any(".lora_A." in name for name in adapted.checkpoint_tensors())
    page["for_others"](adapted, tmp_path / "mine")
    again = OpenVlaOft.load(tmp_path / "mine")
    assert again.checkpoint_tensors().keys() == policy.checkpoint_tensors().keys()
    assert all(
        torch.equal(tensor, again.checkpoint_tensors()[name])
        for name, tensor in policy.checkpoint_tensors().items()
    )


def test_an_adapter_is_put_on_its_base_and_trained_further(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = golden_checkpoint.write(tmp_path / "base")
    run = golden_checkpoint.write(tmp_path / "run", HEAD, PROPRIO)
    golden_checkpoint.write_adapter(run / "lora_adapter")
    monkeypatch.setattr(
        tensor_reading, "download", lambda hub_id, without: {"openvla/openvla-7b": base}[hub_id]
    )
    assert page["on_its_base"](run).config.lora is None
    assert page["trained_further"](run).config.lora.targets == "all-linear"


def test_the_page_names_every_convention() -> None:
    assert all(f"`{convention}`" in PAGE.read_text() for convention in CONVENTIONS)


@pytest.mark.parametrize(
    ("convention", "images", "has_stop_token"),
    [
        ("simplevla", "exact", True),
        ("simplevla_robotwin", "crop", True),
        ("rlinf", "bicubic_float", False),
        ("rlinf_official", "bicubic_pillow", True),
        ("rlinf_robotwin", "crop", True),
    ],
)
def test_a_convention_settles_images_and_the_stop_token(
    convention: Any, images: str, has_stop_token: bool, public: Path
) -> None:
    config = OpenVlaOft.load(public, norm_key="libero_goal", convention=convention).config
    assert (config.images, config.has_stop_token) == (images, has_stop_token)
    assert config.action_bounds.epsilon == 1e-8
