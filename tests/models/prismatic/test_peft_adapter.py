"""Adapters that peft saved: put on their base, merged or trained on, as OpenVLA-OFT's own code
merges them.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_checkpoint
import huggingface_hub
import public_checkpoint
import pytest
import torch
from golden_checkpoint import (
    FILM,
    GREEDY,
    HEAD,
    PROPRIO,
    golden,
    observations,
    require_close,
    stacked,
    uncropped,
)
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic.adapters import MAY_DIFFER
from vla_rl.models.prismatic.config import TINY_TOKENIZER, LoraConfig
from vla_rl.models.prismatic.folder import open_folder
from vla_rl.models.tensor_reading import download

MakeObservation = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_checkpoint.write(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A folder of OpenVLA-OFT's training without merging: an adapter, parts, and the processor's
    files.
    """
    folder = golden_checkpoint.write(tmp_path_factory.mktemp("trained") / "run", HEAD, PROPRIO)
    golden_checkpoint.write_adapter(folder / "lora_adapter", base)
    for name in ("config.json", "vla_rl.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def plain(base: Path) -> OpenVlaOft:
    """The base alone."""
    return OpenVlaOft.load(base)


@pytest.fixture(scope="module")
def merged(trained: Path) -> ContinuousOpenVlaOft:
    return ContinuousOpenVlaOft.load(trained)


@pytest.fixture
def adapter(tmp_path: Path, trained: Path) -> Path:
    return shutil.copytree(trained / "lora_adapter", tmp_path / "adapter")


@torch.no_grad()
def test_an_adapter_of_openvla_ofts_training_acts_as_its_authors_merge_it(
    base: Path, trained: Path, merged: ContinuousOpenVlaOft
) -> None:
    arrays = golden("adapter")
    for policy in (merged, ContinuousOpenVlaOft.load(base, adapter=trained)):
        assert policy.config.lora is None
        whole = uncropped(policy)
        batch = whole.prepare(observations(224))
        require_close(whole.network.compute_trunk(batch), stacked(arrays, "l1_hidden"))
        numbers = whole.sample(batch, GREEDY).tokens
        require_close(
            whole.decode(numbers.numpy())[..., :6], stacked(arrays, "l1_actions")[..., :6]
        )


@pytest.mark.parametrize(("use", "atol"), [("merge", 1e-5), ("train", 5e-5)])
@torch.no_grad()
def test_an_adapter_on_the_output_head_changes_the_logits(
    use: Any, atol: float, base: Path, adapter: Path
) -> None:
    """Kept beside the weights it is added in another order, so the last bits of float32 differ
    more.
    """
    arrays = golden("adapter")
    policy = uncropped(OpenVlaOft.load(base, adapter=adapter, adapter_use=use))
    batch = policy.prepare(observations(224))
    require_close(policy.network.compute_trunk(batch), stacked(arrays, "tokens_hidden"), atol)
    require_close(policy.network(batch)[:, ::7], stacked(arrays, "tokens_256_logits"), atol)
    require_close(
        policy.sample(batch, GREEDY).log_probs, stacked(arrays, "tokens_256_log_probs"), atol
    )


@torch.no_grad()
def test_an_adapter_that_is_kept_acts_as_it_does_merged_and_alone_is_trained(
    trained: Path, merged: ContinuousOpenVlaOft, tmp_path: Path
) -> None:
    kept = ContinuousOpenVlaOft.load(trained, adapter_use="train")
    assert kept.config.lora == LoraConfig(rank=32, alpha=16, targets="all-linear")
    batch = kept.prepare(observations(224))
    expected = merged.network.compute_trunk(batch)
    torch.testing.assert_close(kept.network.compute_trunk(batch), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        kept.merged().network.compute_trunk(batch), expected, atol=1e-5, rtol=0
    )
    kept.save(tmp_path / "kept")
    again = ContinuousOpenVlaOft.load(tmp_path / "kept")
    assert torch.equal(again.network.compute_trunk(batch), kept.network.compute_trunk(batch))
    for policy in (kept, again):
        learns = {
            name for name, parameter in policy.network.named_parameters() if parameter.requires_grad
        }
        assert "language_model.lm_head.lora_A.default.weight" in learns
        assert "vision_backbone.featurizer.patch_embed.proj.lora_B.default.weight" in learns
        assert "action_head.model.fc1.weight" in learns
        assert all(
            ".lora_" in name or name.startswith(("action_head.", "proprio_projector."))
            for name in learns
        )


def test_what_stands_beside_an_adapter_comes_before_what_its_base_has(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(trained, tmp_path / "mine")
    statistics = json.loads((mine / "dataset_statistics.json").read_text())
    statistics["libero_goal_no_noops"]["action"]["q01"] = [-0.5] * 7
    (mine / "dataset_statistics.json").write_text(json.dumps(statistics))
    policy = ContinuousOpenVlaOft.load(base, adapter=mine / "lora_adapter")
    assert policy.config.action_bounds.low == (-0.5,) * 7
    policy.save(tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "action_head--latest_checkpoint.pt",
    } <= names
    assert not names & {"adapter_config.json", "adapter_model.safetensors"}
    assert ContinuousOpenVlaOft.load(tmp_path / "merged").config.action_bounds.low == (-0.5,) * 7


def test_weights_that_hold_their_adapter_already_are_taken_as_they_are(
    base: Path, plain: OpenVlaOft, adapter: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base, tmp_path / "published")
    shutil.copytree(adapter, folder / "lora_adapter")
    tensors, expected = OpenVlaOft.load(folder).checkpoint_tensors(), plain.checkpoint_tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    for named in (folder, folder / "lora_adapter"):
        with pytest.raises(
            CheckpointError, match=r"have the adapter in its lora_adapter merged in already"
        ):
            OpenVlaOft.load(folder, adapter=named)


def test_a_base_on_the_machine_of_the_training_is_asked_for(base: Path, tmp_path: Path) -> None:
    alone = golden_checkpoint.write_adapter(tmp_path / "adapter", "/mnt/checkpoints/openvla-7b")
    with pytest.raises(
        CheckpointError,
        match=r"trained on '/mnt/checkpoints/openvla-7b', .* name the adapter beside it",
    ):
        OpenVlaOft.load(alone)
    OpenVlaOft.load(base, adapter=alone)


def test_openvla_takes_an_adapter_too(base: Path, adapter: Path) -> None:
    merged, kept = (
        OpenVla.load(base, adapter=adapter, adapter_use=use) for use in ("merge", "train")
    )
    batch = merged.prepare(observations(224))
    with torch.no_grad():
        sampled, again = merged.sample(batch, GREEDY), kept.sample(batch, GREEDY)
    assert torch.equal(sampled.tokens, again.tokens)
    torch.testing.assert_close(sampled.log_probs, again.log_probs, atol=1e-5, rtol=0)


def test_towers_with_film_are_those_of_their_part(
    trained: Path, merged: ContinuousOpenVlaOft, tmp_path: Path
) -> None:
    """While FiLM stands around the towers, peft saves their adapters under names that a base
    without FiLM does not have.
    """
    folder = golden_checkpoint.write(tmp_path / "film", HEAD, PROPRIO, FILM)
    expected = ContinuousOpenVlaOft.load(folder).checkpoint_tensors()
    (folder / "model.safetensors").unlink()
    saved = load_file(
        shutil.copytree(trained / "lora_adapter", folder / "lora_adapter")
        / "adapter_model.safetensors"
    )
    renamed = {
        name.replace(".vision_backbone.", ".vision_backbone.vision_backbone.").replace(
            ".attn.", ".block.attn."
        ): tensor
        for name, tensor in saved.items()
    }
    save_file(renamed, folder / "lora_adapter" / "adapter_model.safetensors")
    without_film = merged.checkpoint_tensors()
    for name, tensor in ContinuousOpenVlaOft.load(folder).checkpoint_tensors().items():
        is_seen_through = name.startswith(("vision_backbone.", "film."))
        assert torch.equal(tensor, (expected if is_seen_through else without_film)[name]), name
    with pytest.raises(
        CheckpointError, match="has FiLM, whose part holds the towers' adapters merged in"
    ):
        ContinuousOpenVlaOft.load(folder, adapter_use="train")


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "base"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


OF_TRUNK_AND_HEAD = ["q_proj", "v_proj", "lm_head"]
OF_ALL_PARTS = ["proj", "qkv", "fc1", "fc2", "fc3", "k_proj"]


@pytest.mark.parametrize(
    ("targets", "is_safe"),
    [
        (OF_ALL_PARTS, True),
        (OF_TRUNK_AND_HEAD, False),
        pytest.param(OF_ALL_PARTS, False, marks=pytest.mark.proof),
        pytest.param(OF_TRUNK_AND_HEAD, True, marks=pytest.mark.proof),
    ],
)
@torch.no_grad()
def test_an_adapter_saved_by_peft_is_put_where_peft_puts_it(
    is_safe: bool,
    targets: list[str],
    public: Path,
    make_observation: MakeObservation,
    tmp_path: Path,
) -> None:
    import peft

    theirs = OpenVlaOft.load(public, norm_key="libero_goal")
    wrapped = peft.get_peft_model(
        theirs.network,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False),
    )
    with warnings.catch_warnings():  # peft says that it saves the output head's own weight, too
        warnings.simplefilter("ignore", UserWarning)
        wrapped.save_pretrained(tmp_path / "adapter")
    if not is_safe:
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    batch = theirs.prepare([make_observation(0)])
    expected = theirs.network(batch)
    for use in ("merge", "train"):
        ours = OpenVlaOft.load(
            public, norm_key="libero_goal", adapter=tmp_path / "adapter", adapter_use=use
        )
        torch.testing.assert_close(ours.network(batch), expected, atol=2e-5, rtol=0)
    assert ours.config.lora is not None
    assert isinstance(ours.config.lora.targets, tuple)
    assert (ours.config.lora.rank, ours.config.lora.alpha) == (4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_dora": True},
            r"has use_dora True; expected plain LoRA",
        ),
        ({"rank_pattern": {"qkv": 8}}, "rank_pattern"),
        ({"modules_to_save": ["value_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": "many"}, "cannot be read as the configuration of an adapter"),
        ({"r": 8}, "has 49 adapters, expected some, all of rank 8"),
    ],
)
def test_an_adapter_of_another_kind_is_named(
    changes: dict[str, Any], message: str, base: Path, adapter: Path
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        OpenVlaOft.load(base, adapter=adapter)


def peft_fields() -> dict[str, Any]:
    """Each field that peft's configuration has, with a value that is not its default."""
    import peft

    values = peft.LoraConfig(r=4).to_dict()
    others: dict[type, Any] = {bool: True, int: 7, float: 0.5, str: "other", dict: {"a": 1}}
    return {
        name: not value if isinstance(value, bool) else others.get(type(value), ["something"])
        for name, value in values.items()
        if name not in ("r", "lora_alpha", "peft_type")
    }


@pytest.mark.parametrize("name", sorted(peft_fields()))
def test_a_field_that_may_change_what_an_adapter_computes_is_refused_by_its_name(
    name: str, base: Path, adapter: Path
) -> None:
    value = peft_fields()[name]
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, name: value}))
    if name in MAY_DIFFER - {"base_model_name_or_path"} or name == "eva_config":
        open_folder(base, adapter)
    elif name != "base_model_name_or_path":
        with pytest.raises(CheckpointError, match=f"has {name} .*; expected plain LoRA"):
            open_folder(base, adapter)


def test_a_field_that_peft_adds_tomorrow_is_refused_unless_it_is_off(
    base: Path, adapter: Path
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    for off in (None, False, {}, []):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_new": off}))
        open_folder(base, adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_new": "fast"}))
    with pytest.raises(CheckpointError, match="has use_new 'fast'; expected plain LoRA"):
        open_folder(base, adapter)


def test_what_peft_writes_for_a_plain_adapter_is_taken(base: Path, adapter: Path) -> None:
    import peft

    written = peft.LoraConfig(r=32, lora_alpha=16, target_modules=["q_proj"])
    written.save_pretrained(adapter)
    assert open_folder(base, adapter).adapter is not None


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_changed_its_base_first_is_refused(
    init: str, base: Path, adapter: Path
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": init}))
    with pytest.raises(CheckpointError, match=f"init_lora_weights '{init}'; expected plain LoRA"):
        OpenVlaOft.load(base, adapter=adapter)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
@torch.no_grad()
def test_an_adapter_that_left_its_base_as_it_was_is_put_where_peft_puts_it(
    init: Any, public: Path, make_observation: MakeObservation, tmp_path: Path
) -> None:
    import peft

    theirs = OpenVlaOft.load(public, norm_key="libero_goal")
    wrapped = peft.get_peft_model(
        theirs.network,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=init)
        if init != "eva"
        else peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights="eva",
            eva_config=peft.EvaConfig(),
        ),
        low_cpu_mem_usage=init == "eva",
    )  # fmt: skip
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            replaced = torch.full(parameter.shape, 0.05)
            if parameter.device.type == "meta":
                owner, _, leaf = name.rpartition(".")
                wrapped.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(replaced))
            else:
                parameter.copy_(replaced)
    wrapped.save_pretrained(tmp_path / "adapter")
    batch = theirs.prepare([make_observation(0)])
    ours = OpenVlaOft.load(public, norm_key="libero_goal", adapter=tmp_path / "adapter")
    torch.testing.assert_close(ours.network(batch), theirs.network(batch), atol=2e-5, rtol=0)


def test_an_adapter_with_a_number_that_is_not_finite_is_refused(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    for use in ("merge", "train"):
        with pytest.raises(CheckpointError, match="not finite"):
            OpenVlaOft.load(base, adapter=adapter, adapter_use=use)


def test_two_adapters_in_one_folder_have_to_be_the_same(base: Path, adapter: Path) -> None:
    shutil.copytree(adapter, adapter / "lora_adapter")
    OpenVlaOft.load(base, adapter=adapter)
    inner = adapter / "lora_adapter" / "adapter_model.safetensors"
    before = load_file(inner)
    save_file({name: tensor * 2 for name, tensor in before.items()}, inner)
    with pytest.raises(CheckpointError, match=r"two sources of the tensor .*lora_adapter"):
        OpenVlaOft.load(base, adapter=adapter)
    save_file(before, inner)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 7}))
    with pytest.raises(CheckpointError, match=r"two sources of the adapter .*say different things"):
        OpenVlaOft.load(base, adapter=adapter)


def test_an_adapter_in_two_formats_has_to_be_the_same_in_both(base: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.save(tensors, adapter / "adapter_model.bin")
    OpenVlaOft.load(base, adapter=adapter)
    torch.save({name: 2 * each for name, each in tensors.items()}, adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"two sources of the tensor .*adapter_model\.bin"):
        OpenVlaOft.load(base, adapter=adapter)


QKV = "base_model.model.vision_backbone.featurizer.blocks.0.attn.qkv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{QKV}.lora_A.weight": None},
            r"half an adapter for vision_backbone\.featurizer\.blocks\.0\.attn\.qkv",
        ),
        (
            {f"{QKV}.lora_A.weight": torch.zeros(32, 23)},
            r"fits a weight of shape \[72, 23\]; that of .* has \[72, 24\]",
        ),
        ({f"{QKV}.lora_A.weight": torch.zeros(16, 24)}, "whose halves do not fit each other"),
        ({f"{QKV}.lora_magnitude_vector": torch.zeros(72)}, "expected adapters of the plain kind"),
        (
            {
                f"{QKV}2.lora_{half}.weight": torch.zeros(shape)
                for half, shape in (("A", (32, 24)), ("B", (72, 32)))
            },
            r"belongs to vision_backbone\.featurizer\.blocks\.0\.attn\.qkv2, which .* does not have",
        ),
        (
            {"qkv.lora_A.weight": torch.zeros(32, 24)},
            r"holds qkv\.lora_A\.weight; expected names that begin with",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None], message: str, base: Path, adapter: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in {**load_file(file), **changes}.items()
        if tensor is not None
    }
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        OpenVlaOft.load(base, adapter=adapter)


def test_an_adapter_that_is_not_there_is_named(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no adapter to train .* name one \(adapter\)"):
        OpenVlaOft.load(base, adapter_use="train")
    with pytest.raises(
        CheckpointError, match=r"has no adapter; expected adapter_config\.json in it, or"
    ):
        OpenVlaOft.load(base, adapter=base)
    with pytest.raises(
        CheckpointError, match=r"was read without the adapter .*; name it when it is read"
    ):
        OpenVlaOft.load(open_folder(base), adapter=adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has adapter_config\.json, but no adapter_model\.safetensors or"
    ):
        OpenVlaOft.load(base, adapter=adapter)


@pytest.fixture
def hub(
    base: Path, trained: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """Repositories by id; a stand-in for the hub's client copies what the patterns ask for, and
    nothing else.
    """
    merged = shutil.copytree(base, tmp_path / "hub" / "merged")
    shutil.copytree(adapter, merged / "lora_adapter")
    repositories = {"openvla/openvla-7b": base, "lab/adapter": trained, "lab/merged": merged}

    def snapshot(hub_id: str, *, ignore_patterns: list[str]) -> str:
        source, local = repositories[hub_id], tmp_path / "cache" / hub_id
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, local / name)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return repositories


def test_an_adapter_is_fetched_where_there_are_no_weights_without_it(
    hub: dict[str, Path], trained: Path, merged: ContinuousOpenVlaOft
) -> None:
    OpenVlaOft.load("lab/merged")
    assert not (download("lab/merged", without=["*"]) / "lora_adapter").exists()
    config = trained / "lora_adapter" / "adapter_config.json"
    before = config.read_text()
    # OpenVLA-OFT's training notes where the hub's client kept the base
    snapshot = "/home/me/.cache/hub/models--openvla--openvla-7b/snapshots/0123abc"
    try:
        config.write_text(json.dumps({**json.loads(before), "base_model_name_or_path": snapshot}))
        found = ContinuousOpenVlaOft.load("lab/adapter").checkpoint_tensors()
    finally:
        config.write_text(before)
    expected = merged.checkpoint_tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_main_weights_beside_an_adapter_are_not_fetched(hub: dict[str, Path], base: Path) -> None:
    OpenVlaOft.load(base, adapter="lab/merged")
    names = {path.name for path in download("lab/merged", without=["*"]).iterdir()}
    assert "model.safetensors" not in names
    assert "lora_adapter" in names
