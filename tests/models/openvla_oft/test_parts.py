"""Checkpoints as OpenVLA-OFT's code leaves them for ALOHA: FiLM in a part, chunks of 25, 14 joints,
three cameras, least and greatest values. The oracle (`public_checkpoint`) is timm and peft alone."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import public_checkpoint
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.loading import CheckpointFormat, load_policy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic.config import TINY_TOKENIZER, LoraConfig
from vla_rl.types import Sampling

CAMERAS = ("image", "left_wrist_image", "right_wrist_image")
NUM_JOINTS, CHUNK = 14, 25
INSTRUCTION = "fold the shirt"
OTHER_INSTRUCTION = "put the bowl on the stove"


def statistics() -> dict[str, Any]:
    """Joint positions: every number is scaled, the grippers' too."""
    low, high = (
        [-1.0 - 0.1 * joint for joint in range(NUM_JOINTS)],
        [2.0 + 0.1 * joint for joint in range(NUM_JOINTS)],
    )
    ends = {"min": low, "max": high, "q01": [0.5 * x for x in low], "q99": [0.5 * x for x in high]}
    return {"action": {**ends, "mask": [True] * NUM_JOINTS}, "proprio": ends}


def parts_of() -> public_checkpoint.Parts:
    return public_checkpoint.Parts(seed=1, action_dim=NUM_JOINTS, proprio_dim=NUM_JOINTS)


@pytest.fixture(scope="module")
def oracle() -> public_checkpoint.Parts:
    parts = parts_of()
    public_checkpoint.put_film(parts, rank=24)
    return parts


@pytest.fixture(scope="module")
def public(oracle: public_checkpoint.Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "aloha"
    plain = parts_of()
    public_checkpoint.write(
        folder, plain, TINY_TOKENIZER
    )  # the towers among the main weights know neither FiLM nor adapters
    plain.write_parts(folder)
    public_checkpoint.write_film_part(folder, oracle)
    (folder / "dataset_statistics.json").write_text(json.dumps({"aloha_fold": statistics()}))
    return folder


@pytest.fixture
def folder(public: Path, tmp_path: Path) -> Path:
    return shutil.copytree(public, tmp_path / "aloha")


def load(folder: Path, **arguments: Any) -> ContinuousOpenVlaOft:
    said = {
        "norm_key": "aloha_fold",
        "normalization": "bounds",
        "cameras": CAMERAS,
        "chunk_size": CHUNK,
    }
    return ContinuousOpenVlaOft.load(folder, **{**said, **arguments})


@pytest.fixture(scope="module")
def loaded(public: Path) -> ContinuousOpenVlaOft:
    """Shared by tests that do not change it."""
    return load(public)


@pytest.fixture(scope="module")
def saved(loaded: ContinuousOpenVlaOft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "ours"
    loaded.save(folder)
    return folder


@pytest.fixture(scope="module")
def decision(loaded: ContinuousOpenVlaOft) -> torch.Tensor:
    return decided(loaded, observation_of())


def observation_of(instruction: str = INSTRUCTION) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    frames = {camera: rng.integers(0, 256, (28, 28, 3), dtype=np.uint8) for camera in CAMERAS}
    return {
        **frames,
        "state": rng.uniform(-1, 1, NUM_JOINTS).astype(np.float32),
        "instruction": instruction,
    }


def decided(policy: ContinuousOpenVlaOft, *observations: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        numbers = policy.sample(
            policy.prepare(observations), [Sampling(greedy=True)] * len(observations)
        ).tokens
    return numbers.view(len(observations), CHUNK, NUM_JOINTS)


def expected(
    parts: public_checkpoint.Parts, policy: ContinuousOpenVlaOft, observation: dict[str, Any]
) -> torch.Tensor:
    batch = policy.prepare([observation])
    assert batch.proprio is not None
    prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
    public_checkpoint.condition_on(parts, prompt)
    with torch.no_grad():
        hidden = parts.read(
            list(batch.images[0]), prompt, batch.proprio[0], num_numbers=CHUNK * NUM_JOINTS
        )
        return parts.regress(hidden, action_dim=NUM_JOINTS)


def test_a_public_checkpoint_with_film_acts_as_the_libraries_alone_say(
    loaded: ContinuousOpenVlaOft, oracle: public_checkpoint.Parts
) -> None:
    for instruction in (INSTRUCTION, OTHER_INSTRUCTION):
        observation = observation_of(instruction)
        numbers = decided(loaded, observation)[0]
        torch.testing.assert_close(
            numbers, expected(oracle, loaded, observation), atol=5e-5, rtol=0
        )


def test_without_its_part_it_would_act_otherwise(folder: Path, decision: torch.Tensor) -> None:
    (folder / "vision_backbone--100000_checkpoint.pt").unlink()
    assert (decided(load(folder), observation_of()) - decision).abs().max() > 1e-2


def test_prompts_of_other_lengths_in_a_batch_do_not_blur_the_condition(
    loaded: ContinuousOpenVlaOft,
) -> None:
    observations = [observation_of(), observation_of(OTHER_INSTRUCTION)]
    together = decided(loaded, *observations)
    alone = torch.cat([decided(loaded, observation) for observation in observations])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)


def test_its_actions_are_joints_between_the_least_and_greatest_values(
    loaded: ContinuousOpenVlaOft,
) -> None:
    bounds = loaded.config.action_bounds
    assert (bounds.low, bounds.high) == (
        tuple(statistics()["action"]["min"]),
        tuple(statistics()["action"]["max"]),
    )
    # the last joint is scaled like the others, so nothing of it is turned round
    assert bounds.gripper == "signed"
    assert bounds.epsilon == 1e-8
    chunk = loaded.decode(np.full((1, CHUNK * NUM_JOINTS), 0.5, np.float32))[0]
    np.testing.assert_allclose(chunk, np.broadcast_to([0.25 * low + 0.75 * high for low, high in zip(
        bounds.low, bounds.high, strict=True)], (CHUNK, NUM_JOINTS)), rtol=1e-6)  # fmt: skip


def test_what_is_saved_is_what_the_authors_code_looks_for(
    public: Path, loaded: ContinuousOpenVlaOft, saved: Path, oracle: public_checkpoint.Parts
) -> None:
    """That code makes adapters of rank 32 and FiLM in the towers, and loads the part strictly."""
    for name in ("config.json", "model.safetensors.index.json"):
        assert (saved / name).read_bytes() == (public / name).read_bytes(), name
    theirs = parts_of()
    public_checkpoint.put_film(theirs, rank=32)
    part = torch.load(saved / "vision_backbone--latest_checkpoint.pt", weights_only=True)
    assert part.keys() == public_checkpoint.film_part(theirs).keys()
    # else they could never be trained
    assert all(tensor.any() for name, tensor in part.items() if ".lora_A." in name)
    for name, tower in (("featurizer", theirs.dino), ("fused_featurizer", theirs.siglip)):
        prefix = f"vision_backbone.{name}."
        state = {
            key.removeprefix(prefix): tensor
            for key, tensor in part.items()
            if key.startswith(prefix)
        }
        tower.load_state_dict(
            {key.replace(".scale_factor", ".gamma"): tensor for key, tensor in state.items()}
        )
    observation = observation_of()
    torch.testing.assert_close(
        expected(theirs, loaded, observation),
        expected(oracle, loaded, observation),
        atol=5e-5,
        rtol=0,
    )
    for name in ("action_head", "proprio_projector"):
        before = torch.load(public / f"{name}--150000_checkpoint.pt", weights_only=True)
        after = torch.load(saved / f"{name}--latest_checkpoint.pt", weights_only=True)
        assert {key.removeprefix("module."): tensor.tolist() for key, tensor in before.items()} == {
            key: tensor.tolist() for key, tensor in after.items()
        }


def test_a_saved_one_needs_no_arguments_and_decides_the_same(
    saved: Path, decision: torch.Tensor, tmp_path: Path
) -> None:
    again = ContinuousOpenVlaOft.load(saved)
    assert torch.equal(decided(again, observation_of()), decision)
    again.save(tmp_path / "twice")
    for path in saved.iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes(), path.name


def test_adapters_of_our_own_are_kept_and_can_be_merged_for_others(
    loaded: ContinuousOpenVlaOft, tmp_path: Path
) -> None:
    adapted = loaded.adapted(LoraConfig(rank=4, alpha=8), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.network.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    adapted.save(tmp_path / "adapted")
    adapted.merged().save(tmp_path / "merged")
    decision = decided(adapted, observation_of())
    again = ContinuousOpenVlaOft.load(tmp_path / "adapted").checkpoint_tensors()
    assert all(
        torch.equal(tensor, again[name]) for name, tensor in adapted.checkpoint_tensors().items()
    )
    merged = decided(ContinuousOpenVlaOft.load(tmp_path / "merged"), observation_of())
    torch.testing.assert_close(merged, decision, atol=5e-5, rtol=0)


def test_the_page_on_checkpoints_loads_it(public: Path, decision: torch.Tensor) -> None:
    names: dict[str, Any] = {}
    page = Path(__file__).parents[3] / "docs" / "checkpoints.md"
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(snippet, page.name, "exec"), names)
    policy = names["load_two_arms"](public, "aloha_fold")
    assert torch.equal(decided(policy, observation_of()), decision)


def test_recipes_load_it_by_their_options(public: Path, decision: torch.Tensor) -> None:
    said = CheckpointFormat(
        norm_key="aloha_fold", normalization="bounds", cameras=CAMERAS, chunk_size=CHUNK
    )
    policy = load_policy(str(public), said, "cpu")
    assert torch.equal(decided(policy, observation_of()), decision)


def test_weights_in_another_dtype_are_cast_with_the_film(public: Path) -> None:
    policy = load(public, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in policy.checkpoint_tensors().values()} == {torch.bfloat16}
    assert torch.isfinite(decided(policy, observation_of())).all()


def test_a_part_in_float32_beside_weights_in_bfloat16_takes_their_dtype(
    folder: Path, oracle: public_checkpoint.Parts
) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    policy = load(folder)
    film = {
        name: tensor
        for name, tensor in policy.network.state_dict().items()
        if name.startswith(("film.", "vision_"))
    }
    assert {tensor.dtype for tensor in film.values()} == {torch.bfloat16}
    numbers = decided(policy, observation_of())[0]
    torch.testing.assert_close(
        numbers, expected(oracle, policy, observation_of()), atol=0.1, rtol=0
    )


def test_names_with_both_prefixes_are_the_same_names(
    folder: Path, loaded: ContinuousOpenVlaOft
) -> None:
    before = loaded.checkpoint_tensors()
    path = folder / "vision_backbone--100000_checkpoint.pt"
    part = torch.load(path, weights_only=True)
    torch.save({f"vision_backbone.{name}": tensor for name, tensor in part.items()}, path)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in load(folder).checkpoint_tensors().items()
    )


def test_towers_that_are_replaced_are_not_read(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.startswith("vision_backbone."):
                tensors[name] = torch.full_like(tensors[name], float("nan"))
        save_file(tensors, file)
    assert torch.isfinite(decided(load(folder), observation_of())).all()


def test_a_chunk_that_the_folder_does_not_say_has_to_be_said(public: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"actions of 14 numbers are not LIBERO's; set chunk_size \(25"
    ):
        load(public, chunk_size=None)
    with pytest.raises(ConfigError, match=r"chunk_size is 0, expected at least 1"):
        load(public, chunk_size=0)


def test_a_chunk_that_the_folder_does_say_cannot_be_another(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="has the chunk_size 25, not 8"):
        ContinuousOpenVlaOft.load(saved, chunk_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda part: part.pop("vision_backbone.featurizer.blocks.1.block.norm1.bias"),
            r"lack 1 tensors, .*norm1\.bias",
        ),
        (
            lambda part: part.pop("vision_backbone.featurizer.blocks.2.shift.bias"),
            r"lack 1 tensors, .*er\.2\.shift\.bias",
        ),
        (
            lambda part: part.pop(
                "vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_A.default.weight"
            ),
            r"half an adapter for vision_backbone\.featurizer\.blocks\.0\.block\.attn\.qkv",
        ),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.blocks.0.norm1.bias": torch.zeros(24)}
            ),
            r"holds vision_backbone\.featurizer\.blocks\.0\.norm1\.bias twice",
        ),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.blocks.0.lora_magnitude_vector": torch.zeros(1)}
            ),
            r"holds .*lora_magnitude_vector; expected adapters of the plain kind",
        ),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.norm.lora_A.other.weight": torch.zeros(1, 1)}
            ),
            "has the adapters default, other; expected one",
        ),
        (
            lambda part: part.update(
                {
                    f"vision_backbone.other.lora_{half}.default.weight": torch.zeros(1, 1)
                    for half in "AB"
                }
            ),
            r"an adapter for vision_backbone\.other, which it does not hold",
        ),
        (lambda part: part.update({3: torch.zeros(1)}), "holds no tensors by name"),
        (lambda part: part.update(other=torch.zeros(1)), "holds other; expected the towers"),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.blocks.0.block.norm3.bias": torch.zeros(1)}
            ),
            r"1 unknown: vision_backbone\.featurizer\.blocks\.0\.norm3\.bias",
        ),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.blocks.0.scale.bias": torch.zeros(3)}
            ),
            r"film\.featurizer\.0\.scale\.bias \[3\] instead of \[24\]",
        ),
        (
            lambda part: part.update(
                {"vision_backbone.featurizer.blocks.0.shift.bias": torch.full((24,), float("nan"))}
            ),
            r"film\.featurizer\.0\.shift\.bias .* not finite",
        ),
    ],
)
def test_a_part_with_holes_or_strangers_is_refused_by_name(
    change: Any, message: str, folder: Path
) -> None:
    path = folder / "vision_backbone--100000_checkpoint.pt"
    part = torch.load(path, weights_only=True)
    change(part)
    torch.save(part, path)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_an_adapter_of_another_shape_is_refused(folder: Path) -> None:
    path = folder / "vision_backbone--100000_checkpoint.pt"
    part = torch.load(path, weights_only=True)
    part["vision_backbone.featurizer.blocks.0.block.attn.qkv.lora_A.default.weight"] = torch.zeros(
        24, 5
    )
    torch.save(part, path)
    with pytest.raises(CheckpointError, match="has an adapter of another shape"):
        load(folder)


def test_what_stands_twice_is_refused(folder: Path) -> None:
    for name, message in (
        ("proprio_projector.fc1.bias", r"has proprio_projector\.fc1\.bias twice"),
        ("film.featurizer.0.scale.bias", r"has film\.featurizer\.0\.scale\.bias twice"),
    ):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        save_file({name: torch.zeros(1)}, folder / "more.safetensors")
        index["weight_map"] = {
            key: file for key, file in index["weight_map"].items() if file != "more.safetensors"
        }
        index["weight_map"][name] = "more.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_part_that_nobody_knows_is_refused(folder: Path) -> None:
    torch.save({}, folder / "dist_head--150000_checkpoint.pt")
    with pytest.raises(
        CheckpointError,
        match=r"has dist_head--150000_checkpoint\.pt beside its weights, which is none",
    ):
        load(folder)


def test_a_head_for_another_number_of_joints_is_refused(folder: Path) -> None:
    public_checkpoint.Parts(seed=1, proprio_dim=NUM_JOINTS).write_parts(folder)
    with pytest.raises(
        CheckpointError, match=r"action_head\.model\.fc2\.weight \[7, 32\] instead of \[14, 32\]"
    ):
        load(folder)


def test_other_classes_leave_no_part_out_in_silence(folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has an action head, action_head--150000_checkpoint\.pt"
    ):
        OpenVlaOft.load(folder, norm_key="aloha_fold", chunk_size=CHUNK)
    with pytest.raises(
        CheckpointError, match=r"action_head--150000_checkpoint\.pt, .* OpenVLA-OFT"
    ):
        OpenVla.load(folder, norm_key="aloha_fold")
