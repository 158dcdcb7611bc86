"""Checkpoints: whole or not there, checked before use, and no older one is harmed by a newer one's
failure.
"""

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from disks import tmpfs

from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError
from vla_rl.learner import (
    Learner,
    LearnerConfig,
    TeamState,
    TrainingState,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prepare_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from vla_rl.learner.checkpoint.folders import renamed_checkpoints, set_newer_aside
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Group, Trajectory


def state_of(version: int, num_floats: int = 1000) -> TeamState:
    tensors = {"weight": torch.arange(num_floats, dtype=torch.float32) + version}
    return TeamState.of_one(
        TrainingState(
            weight_version=version,
            policy=tensors,
            optimizer=tensors,
            rng=tensors,
            policy_files={"config.json": b"{}"},
        )
    )


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with tmpfs("1m") as disk:
        yield disk


async def test_a_run_goes_on_from_its_checkpoint_with_all_its_parts(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: Callable[..., Trajectory], tmp_path: Path
) -> None:
    group = Group(
        group_id=1,
        trajectories=(run_policy(policy, 1, 2), run_policy(policy, 2, 3)),
        dispatch_version=0,
    )
    async with asyncio.timeout(60):
        learner = Learner(policy, lane, LearnerConfig())
        await learner.update(group.trajectories, [1.0, -1.0])
        state = await learner.snapshot()
        expected_draw = (torch.rand(3), np.random.random(3))
        folder = await save_checkpoint(
            tmp_path, TeamState.of_one(state), {"cursor": {"epoch": 2}, "buffered": [group]}
        )
        await learner.update(group.trajectories, [1.0, -1.0])

        checkpoint = await load_checkpoint(folder)
        twin = OpenVlaOft.load(checkpoint.policy_folder)  # the policy is a checkpoint of its own
        other = Learner(twin, lane, LearnerConfig())
        await other.restore(checkpoint.state.only)
        drawn = (torch.rand(3), np.random.random(3))
        buffered = checkpoint.part("buffered", list[Group])
        await other.update(buffered[0].trajectories, [1.0, -1.0])
    assert folder.name == "update-000001"
    assert checkpoint.part("cursor", dict[str, int]) == {"epoch": 2}
    assert torch.equal(drawn[0], expected_draw[0])
    np.testing.assert_array_equal(drawn[1], expected_draw[1])
    mine, its = policy.checkpoint_tensors(), twin.checkpoint_tensors()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


async def test_a_snapshot_is_not_changed_by_the_next_update(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: Callable[..., Trajectory]
) -> None:
    async with asyncio.timeout(60):
        learner = Learner(policy, lane, LearnerConfig())
        await learner.update([run_policy(policy, 1, 2)], [1.0])
        state = await learner.snapshot()
        kept = {
            name: tensor.clone() for name, tensor in {**state.policy, **state.optimizer}.items()
        }
        await learner.update([run_policy(policy, 2, 2)], [1.0])
    assert all(
        torch.equal(tensor, kept[name])
        for name, tensor in {**state.policy, **state.optimizer}.items()
    )


async def test_the_newest_is_found_and_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    async with asyncio.timeout(30):
        for version in (9, 10, 11, 1_000_000):
            await save_checkpoint(tmp_path, state_of(version), {}, keep_last=2)
    names = [folder.name for folder in list_checkpoints(tmp_path)]
    assert names == ["update-000011", "update-1000000"]
    assert contents(tmp_path) == set(names)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert (await load_checkpoint(latest)).state.weight_version == 1_000_000


async def test_half_written_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        whole = await save_checkpoint(tmp_path, state_of(1), {"cursor": 3})
        await load_checkpoint(whole)
        for number, (damage, complaint) in enumerate(
            (
                (lambda folder: (folder / "manifest.json").unlink(), "half-written"),
                (lambda folder: (folder / "optimizer.safetensors").unlink(), "cannot be read"),
                (
                    lambda folder: os.truncate(folder / "rng.safetensors", 100),
                    "has 100 bytes, expected",
                ),
                (
                    lambda folder: flip_a_bit(folder / "policy" / "model.safetensors"),
                    "digest differs",
                ),
                (lambda folder: (folder / "manifest.json").write_bytes(b"{"), "damaged"),
                (
                    lambda folder: replace_in(
                        folder / "manifest.json", b"num_bytes", b"num_byt\xff"
                    ),
                    "damaged, take an older",
                ),
                (lambda folder: (folder / "manifest.json").write_bytes(b"[" * 5000), "damaged"),
                (lambda folder: flip_a_bit(folder / "parts" / "cursor.msgpack"), "digest differs"),
            ),
            start=2,
        ):
            folder = tmp_path / f"update-{number:06d}"
            shutil.copytree(whole, folder)
            damage(folder)
            with pytest.raises(CheckpointError, match=complaint):
                await load_checkpoint(folder)
    assert list_checkpoints(tmp_path)[0] == whole
    # no manifest: not a candidate at all
    assert tmp_path / "update-000002" not in list_checkpoints(tmp_path)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_a_prepared_checkpoint_is_found_once_it_is_committed(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        older = await save_checkpoint(tmp_path, state_of(1), {})
        first = await prepare_checkpoint(tmp_path, state_of(2), {"cursor": 2})
        # which removes what a crash left, not the first
        second = await prepare_checkpoint(tmp_path, state_of(3), {})
        assert list_checkpoints(tmp_path) == [older]
        folder = await first.commit(keep_last=1, metrics=b'{"update":2}\n')
        assert list_checkpoints(tmp_path) == [folder]
        checkpoint = await load_checkpoint(folder)
        assert checkpoint.part("cursor", int) == 2
        assert checkpoint.metrics == b'{"update":2}\n'
        await second.discard()
        with pytest.raises(CheckpointError, match="update-000003 could not be written"):
            await second.commit()
    assert contents(tmp_path) == {"update-000002"}


async def test_a_cancelled_preparation_leaves_nothing(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        preparing = asyncio.create_task(prepare_checkpoint(tmp_path, state_of(1), {}))
        await asyncio.sleep(0)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    assert contents(tmp_path) == set()


async def test_a_folder_that_is_named_for_another_update_is_refused_by_name_and_is_not_the_newest(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(30):
        for version in (11, 12):
            await save_checkpoint(tmp_path, state_of(version), {})
        renamed = tmp_path / "update-000099"
        shutil.copytree(tmp_path / "update-000012", renamed)
        with pytest.raises(
            CheckpointError,
            match=r"update-000099 is named for update 99, but its checkpoint.json says 12",
        ):
            await load_checkpoint(renamed)
        assert latest_checkpoint(tmp_path) == tmp_path / "update-000012"
        assert renamed_checkpoints(tmp_path) == {renamed: 12}
        # it takes no place of those that are kept, and is not removed: it may be a copy that the
        # user made
        await save_checkpoint(tmp_path, state_of(13), {}, keep_last=2)
        assert contents(tmp_path) == {"update-000012", "update-000013", "update-000099"}
        assert await verify_checkpoint(tmp_path / "update-000013") == 13


async def test_checkpoints_newer_than_the_one_that_is_gone_on_from_are_set_aside_and_kept(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(30):
        for version in (1, 2, 3, 3):
            await save_checkpoint(tmp_path, state_of(version), {})
        moved = set_newer_aside(tmp_path, tmp_path / "update-000002")
        assert [path.name for path in moved] == ["aside-update-000003", "aside-update-000003-1"]
        assert latest_checkpoint(tmp_path) == tmp_path / "update-000002"
        await save_checkpoint(tmp_path, state_of(3), {}, keep_last=1)
        assert [path.name for path in set_newer_aside(tmp_path, tmp_path / "update-000001")] == [
            "aside-update-000003-2"
        ]
    assert contents(tmp_path) == {f"aside-update-000003{suffix}" for suffix in ("", "-1", "-2")}


async def test_a_part_that_is_not_there_or_another_type_is_named(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        checkpoint = await load_checkpoint(
            await save_checkpoint(tmp_path, state_of(1), {"cursor": 3})
        )
    with pytest.raises(CheckpointError, match=r"has no part 'groups'; it has \['cursor'\]"):
        checkpoint.part("groups", list[int])
    with pytest.raises(CheckpointError, match=r"part 'cursor' of .* cannot be read"):
        checkpoint.part("cursor", str)


async def test_what_cannot_be_packed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be packed"):
        await save_checkpoint(tmp_path, state_of(1), {"cursor": object()})
    with pytest.raises(ValueError, match="not a word"):
        await save_checkpoint(tmp_path, state_of(1), {"../cursor": 1})
    assert contents(tmp_path) == set()


@pytest.mark.needs_root
async def test_a_disk_without_room_is_refused_before_anything_is_written(small_disk: Path) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(CheckpointError, match=r"bytes are needed and [\d,]+ are free"):
            await save_checkpoint(small_disk, state_of(1, num_floats=1_000_000), {})
    assert contents(small_disk) == set()


async def test_a_disk_that_fills_up_while_saving_harms_no_older_checkpoint(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the disk: it strikes in the middle of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with asyncio.timeout(30):
        older = await save_checkpoint(tmp_path, state_of(1), {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="update-000002 could not be written"):
                await save_checkpoint(tmp_path, state_of(2, num_floats=1_000_000), {}, keep_last=1)
            with pytest.raises(CheckpointError, match="update-000003 could not be written"):
                await save_checkpoint(
                    tmp_path, state_of(3), {"frames": np.zeros(1 << 21, np.uint8)}, keep_last=1
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(tmp_path) == {older.name}
        assert (await load_checkpoint(older)).state.weight_version == 1


async def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/update-000001 could not be written"):
        await save_checkpoint(tmp_path / "file", state_of(1), {})


async def test_a_version_saved_again_counts_as_newer(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        for number in range(3):
            await save_checkpoint(tmp_path, state_of(1), {"number": number}, keep_last=2)
        assert [folder.name for folder in list_checkpoints(tmp_path)] == [
            "update-000001-1",
            "update-000001-2",
        ]
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        assert (await load_checkpoint(latest)).part("number", int) == 2
        await save_checkpoint(tmp_path, state_of(2), {}, keep_last=1)
    assert contents(tmp_path) == {"update-000002"}


async def test_a_cancelled_save_is_finished_first(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        saving = asyncio.create_task(save_checkpoint(tmp_path, state_of(1), {}))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        folder = latest_checkpoint(tmp_path)
        assert folder is not None
        assert (await load_checkpoint(folder)).state.weight_version == 1
    assert contents(tmp_path) == {folder.name}


KILLED = """
    import asyncio, os, signal, sys
    from pathlib import Path
    import torch
    from vla_rl.learner import TeamState, TrainingState
    from vla_rl.learner import latest_checkpoint, load_checkpoint, save_checkpoint

    root, events = Path(sys.argv[1]), ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

    def state(version):
        tensors = {"weight": torch.zeros(1000) + version}
        one = TrainingState(version, tensors, tensors, tensors, {"config.json": b"{}"})
        return TeamState.of_one(one)

    def save_and_die(version, last_event):
        count = 0
        def die(event, arguments):
            nonlocal count
            is_read = event == "open" and arguments[2] & os.O_ACCMODE == os.O_RDONLY
            if event in events and str(root) in str(arguments[0]) and not is_read:
                count += 1
                if count == last_event:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(die)
        asyncio.run(save_checkpoint(root, state(version), {"cursor": version}, keep_last=1))
        os._exit(0)

    asyncio.run(save_checkpoint(root, state(1), {"cursor": 1}))
    for last_event in range(1, 1000):
        pid = os.fork()
        if pid == 0:
            save_and_die(last_event + 1, last_event)
        _, status = os.waitpid(pid, 0)
        checkpoint = asyncio.run(load_checkpoint(latest_checkpoint(root)))
        version = checkpoint.state.weight_version
        assert checkpoint.part("cursor", int) == version <= last_event + 1, (version, last_event)
        assert checkpoint.state.only.policy["weight"].unique().tolist() == [float(version)]
        if status == 0:
            print(last_event - 1, version)
            break
"""


def test_a_kill_at_every_step_of_saving_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """A process dies by SIGKILL at the first, second, third ... file operation below the root,
    until one gets through.
    """
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert output.returncode == 0, output.stderr
    num_kills, version = map(int, output.stdout.split())
    assert num_kills > 15
    assert version == num_kills + 2  # the one that got through is the newest
    # the one that got through kept one, and removed what the dead had left
    assert contents(tmp_path) == {f"update-{version:06d}"}


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    folder = asyncio.run(save_checkpoint(tmp_path, state_of(12), {}))
    assert msgspec.json.decode((folder / "checkpoint.json").read_bytes()) == {
        "format": 1,
        "weight_version": 12,
    }


async def test_whoever_may_read_a_new_file_may_read_a_checkpoint(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    async with asyncio.timeout(30):
        folder = await save_checkpoint(tmp_path, state_of(1), {"cursor": 3})
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert modes == {plain.stat().st_mode}
