"""What is refused of a damaged checkpoint, and values that come back from bytes as they were."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.errors import CheckpointError
from vla_rl.learner import (
    TeamState,
    TrainingState,
    list_checkpoints,
    load_checkpoint,
    read_policy_tensors,
    save_checkpoint,
)
from vla_rl.learner.checkpoint.folders import incomplete_checkpoints, set_incomplete_aside
from vla_rl.learner.checkpoint.state import pack, unpack
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Group, StopReason, Trajectory
from vla_rl.util.atomic_files import MANIFEST, FileEntry, digest_file, read_manifest


def state_of(version: int, number: float = 1.0) -> TeamState:
    tensors = {"weight": torch.full((4,), number)}
    rest = {"step": torch.zeros(2)}
    one = TrainingState(version, tensors, rest, rest, {"config.json": b"{}", "a/b.jinja": b"x"})
    return TeamState.of_one(one)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sign_again(folder: Path) -> None:
    """Write a manifest that agrees with the files as they are."""
    entries = {
        name: FileEntry((folder / name).stat().st_size, digest_file(folder / name))
        for name in read_manifest(folder)
        if (folder / name).exists()
    }
    (folder / MANIFEST).write_bytes(msgspec.json.encode(entries))


def unlist(folder: Path, name: str) -> None:
    entries = read_manifest(folder)
    del entries[name]
    (folder / MANIFEST).write_bytes(msgspec.json.encode(entries))


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def manifest_as_folder(folder: Path) -> None:
    remove_manifest(folder)
    (folder / MANIFEST).mkdir()


def manifest_as_pipe(folder: Path) -> None:
    remove_manifest(folder)
    os.mkfifo(folder / MANIFEST)


def manifest_as_broken_link(folder: Path) -> None:
    remove_manifest(folder)
    (folder / MANIFEST).symlink_to("nowhere")


async def test_a_checkpoint_without_its_manifest_is_kept_aside_with_one_line_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save_checkpoint(tmp_path, state_of(1), {})
    newest = await save_checkpoint(tmp_path, state_of(2), {})
    (newest / MANIFEST).unlink()
    assert incomplete_checkpoints(tmp_path) == [newest]
    await save_checkpoint(tmp_path, state_of(3), {}, keep_last=1)
    aside = tmp_path / "aside-update-000002"
    assert names_in(tmp_path) == [aside.name, "update-000003"]
    assert (aside / "policy" / "model.safetensors").exists()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("update-000002 has no manifest.json")
    assert str(aside) in line
    # nor does any later save remove it
    await save_checkpoint(tmp_path, state_of(4), {}, keep_last=1)
    assert aside.exists()


async def test_two_that_lost_their_manifests_get_names_of_their_own(tmp_path: Path) -> None:
    for _ in range(2):
        folder = await save_checkpoint(tmp_path, state_of(2), {})
        (folder / MANIFEST).unlink()
        set_incomplete_aside(tmp_path)
    assert names_in(tmp_path) == ["aside-update-000002", "aside-update-000002-2"]


@pytest.mark.parametrize("damage", [manifest_as_folder, manifest_as_pipe, manifest_as_broken_link])
async def test_a_manifest_that_is_there_and_cannot_be_read_is_damage(
    damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1), {})
    damage(folder)
    assert list_checkpoints(tmp_path) == [folder]
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        await load_checkpoint(folder)
    await save_checkpoint(tmp_path, state_of(2), {})
    assert folder.exists()


@pytest.mark.parametrize(
    "name",
    ["policy/model.safetensors", "optimizer.safetensors", "rng.safetensors", "checkpoint.json"],
)
async def test_a_file_that_the_manifest_does_not_list_is_not_loaded(
    name: str, tmp_path: Path
) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1), {})
    unlist(folder, name)
    with pytest.raises(CheckpointError, match=f"does not list {name}"):
        await load_checkpoint(folder)


async def test_a_critic_that_the_manifest_does_not_list_is_not_loaded(tmp_path: Path) -> None:
    state = replace(state_of(1), critic={"value": torch.zeros(2)})
    folder = await save_checkpoint(tmp_path, state, {})
    assert (await load_checkpoint(folder)).state.critic
    unlist(folder, "critic.safetensors")
    with pytest.raises(CheckpointError, match=r"does not list critic\.safetensors"):
        await load_checkpoint(folder)


async def test_a_configuration_that_is_no_json_is_damage_even_if_its_digest_agrees(
    tmp_path: Path,
) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1), {})
    (folder / "policy" / "config.json").write_bytes(b"{\xff")
    sign_again(folder)
    with pytest.raises(CheckpointError, match=r"policy/config\.json cannot be read"):
        await load_checkpoint(folder)


async def test_a_part_that_cannot_be_decoded_is_a_sentence(tmp_path: Path) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1), {"cursor": {"epoch": 1}})
    for data in (b"\xc1", b"", b"\x91" * 5000):
        (folder / "parts" / "cursor.msgpack").write_bytes(data)
        sign_again(folder)
        checkpoint = await load_checkpoint(folder)
        with pytest.raises(CheckpointError, match=r"part 'cursor' of .* take an older one"):
            checkpoint.part("cursor", dict[str, int])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_are_refused_for_every_family(
    number: float, tmp_path: Path
) -> None:
    """Whatever the family is, its weights come back through here: a user's as well."""
    folder = await save_checkpoint(tmp_path, state_of(1, number), {})
    with pytest.raises(CheckpointError, match=r"weight in .*policy/model.safetensors .*not finite"):
        await load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="not finite"):
        read_policy_tensors(folder)


async def test_a_critic_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    state = replace(state_of(1), critic={"value": torch.tensor([float("nan")])})
    folder = await save_checkpoint(tmp_path, state, {})
    with pytest.raises(CheckpointError, match=r"value in .*critic\.safetensors .*not finite"):
        await load_checkpoint(folder)


async def test_the_tensors_of_a_policy_are_read_from_its_checkpoint_and_verified(
    tmp_path: Path,
) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1, 3.0), {})
    assert read_policy_tensors(folder)["weight"].tolist() == [3.0] * 4
    two = TeamState({"solver": state_of(1, 5.0).only, "checker": state_of(1, 6.0).only})
    team = await save_checkpoint(tmp_path / "team", two, {})
    assert read_policy_tensors(team, "checker")["weight"].tolist() == [6.0] * 4
    data = bytearray((folder / "policy" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "policy" / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="digest differs"):
        read_policy_tensors(folder)


async def test_a_half_removed_checkpoint_of_a_crash_is_removed_by_the_next_save(
    tmp_path: Path,
) -> None:
    folder = await save_checkpoint(tmp_path, state_of(1), {})
    shutil.copytree(folder, tmp_path / ".removing-update-000001-77")
    await save_checkpoint(tmp_path, state_of(2), {})
    assert not (tmp_path / ".removing-update-000001-77").exists()
    assert folder.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array(1.5, np.float32),
        np.zeros((0, 4), np.int64),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["left", "right"]),
        np.array([True, False]),
        np.arange(4, dtype=">i2"),
    ],
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    found = unpack(pack({"nested": [array]}), dict[str, Any])["nested"][0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_a_buffered_group_comes_back_whole(
    policy: OpenVlaOft, run_policy: Callable[..., Trajectory]
) -> None:
    group = Group(
        group_id=3,
        trajectories=(run_policy(policy, 1, 2), run_policy(policy, 2, 1)),
        dispatch_version=4,
    )
    (found,) = unpack(pack([group]), list[Group])
    assert found.trajectories[0].stop_reason is StopReason.TIME_LIMIT
    assert found.trajectories[0].episode == group.trajectories[0].episode
    for mine, its in zip(group.trajectories[0].steps, found.trajectories[0].steps, strict=True):
        np.testing.assert_array_equal(mine.observation["image"], its.observation["image"])
        np.testing.assert_array_equal(mine.chunk.log_probs, its.chunk.log_probs)
        assert mine.observation["instruction"] == its.observation["instruction"]


def test_numpy_numbers_become_plain_ones() -> None:
    assert unpack(pack([np.float64(0.5), np.int32(3), np.bool_(True)]), list[Any]) == [0.5, 3, True]


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), {"path": Path("x")}, np.zeros(2, [("a", "f4")])],
    ids=["object", "array of objects", "path", "array with fields"],
)
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be packed"):
        pack(value)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("M8[s/0]", (1,)), ("|O", (1,)), ("<f8", (2,)), ("<f8", (-1,)), ("<f8", (1 << 63,))],
)
def test_an_array_that_its_bytes_are_not_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    header = msgspec.msgpack.encode((dtype, shape))
    content = len(header).to_bytes(2, "little") + header + bytes(8)
    with pytest.raises(ValueError, match=r"dtype is|bytes are an array of shape"):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, content)), np.ndarray)


def test_a_nesting_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        unpack(b"\x91" * 100_000 + b"\xc0", list[Any])


def test_bytes_of_something_else_are_refused() -> None:
    for data in (
        b"",
        b"\xc1",
        pack({"a": 1}),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"?")),
    ):
        with pytest.raises(ValueError, match="packed bytes are not"):
            unpack(data, list[int])
    with pytest.raises(ValueError, match="packed bytes are not"):
        unpack(pack({"tokens": 3}), dict[str, np.ndarray])
