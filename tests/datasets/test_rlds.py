"""RLDS data sets are read as TensorFlow reads them; the files here were written by tensorflow_datasets 4.9."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from made_datasets import RLDS, copy_rlds

from vla_rl.datasets import DatasetOptions, open_dataset, read_rlds
from vla_rl.datasets.tf_records import read_examples
from vla_rl.errors import DataError


def test_numbers_images_and_instructions_are_those_that_tensorflow_reads() -> None:
    episodes = open_dataset(RLDS / "reach_demo")
    with np.load(RLDS / "read_by_tensorflow.npz") as read:
        for number, episode in enumerate(episodes):
            assert episode.instruction == read[f"{number}/instruction"]
            assert np.array_equal(episode.actions, read[f"{number}/action"])
            assert np.array_equal(episode.vectors["state"], read[f"{number}/state"])
            assert episode.rewards is not None
            assert episode.rewards.tolist() == [0.0] * (episode.num_steps - 1) + [1.0]
            for camera in ("image", "wrist_image"):
                frames = [episode.frames[camera](step) for step in range(episode.num_steps)]
                assert np.array_equal(np.stack(frames), read[f"{number}/{camera}"])
    assert [episode.num_steps for episode in episodes] == [3, 5]


def test_the_folder_of_a_version_and_the_folder_above_it_are_the_same_data() -> None:
    above, version = (read_rlds(RLDS / name) for name in ("reach_demo", "reach_demo/1.0.0"))
    assert [episode.instruction for episode in above] == [
        episode.instruction for episode in version
    ]


def test_two_versions_in_one_folder_are_refused(tmp_path: Path) -> None:
    root = copy_rlds(tmp_path / "set")
    (root / "1.0.1").mkdir()
    (root / "1.0.1/features.json").write_text("{}")
    with pytest.raises(DataError, match=r"has the versions 1\.0\.0, 1\.0\.1"):
        open_dataset(root)


def test_a_shard_that_did_not_arrive_is_named_and_what_a_download_left_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copy_rlds(tmp_path / "set") / "1.0.0"
    (whole,) = root.glob("*.tfrecord*")
    whole = whole.rename(root / "reach_demo-train.tfrecord-00000-of-00003")
    shutil.copy(whole, root / f"{whole.name}.incomplete")
    assert len(read_rlds(root)) == 2
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" is left out")[0] for line in told[:1]] == [f"{whole}.incomplete"]
    assert told[1].startswith(f"{root} has 1 of the 3 files of reach_demo-train, and is read")
    assert "00001 is the first" in told[1]


def test_a_file_that_was_cut_between_two_episodes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copy_rlds(tmp_path / "set") / "1.0.0"
    assert len(read_rlds(root)) == 2
    assert not caplog.records
    (file,) = root.glob("*.tfrecord*")
    whole = file.read_bytes()
    # a record is its length, a checksum of that, its bytes and a checksum of these
    (length,) = struct.unpack("<Q", whole[:8])
    file.write_bytes(whole[: length + 16])
    assert len(read_rlds(root)) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        f"{file} has another number of episodes, 1, than {root / 'dataset_info.json'} says, 2; download the file "
        "again if you want all of them."
    )


def test_what_is_held_out_beside_the_training_split_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copy_rlds(tmp_path / "set") / "1.0.0"
    (training,) = root.glob("*.tfrecord*")
    held_out = root / "reach_demo-val.tfrecord-00000-of-00001"
    shutil.copy(training, held_out)
    assert len(read_rlds(root)) == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{root} has reach_demo-val beside the split train, and is read without")
    training.unlink()
    assert len(read_rlds(root)) == 2


def test_fields_choose_other_observations() -> None:
    (episode, _) = read_rlds(RLDS / "reach_demo", fields={"image": "wrist_image"})
    assert set(episode.frames) == {"image", "wrist_image"}
    assert int(episode.frames["image"](1)[0, 0, 0]) == 40
    with pytest.raises(DataError, match=r"fields name 'front' for 'image', expected one of"):
        read_rlds(RLDS / "reach_demo", fields={"image": "front"})


def test_openvlas_gripper_is_turned_round(tmp_path: Path) -> None:
    # the actions go to -1, which is no number of that convention
    with pytest.raises(DataError, match="these look signed"):
        open_dataset(RLDS / "reach_demo", DatasetOptions(gripper="openvla"))


def write_records(path: Path, *records: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "features.json").write_text(json.dumps({}))
    framed = [struct.pack("<QI", len(each), 0) + each + bytes(4) for each in records]
    path.write_bytes(b"".join(framed))
    return path


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def test_numbers_are_read_packed_and_one_by_one(tmp_path: Path) -> None:
    packed = field(2, field(1, struct.pack("<2f", 1.5, -2.0)))
    single = field(2, b"".join(b"\x0d" + struct.pack("<f", number) for number in (1.5, -2.0)))
    whole = field(3, b"\x08\x03" + b"\x08" + b"\xff" * 9 + b"\x01")  # 3, and -1 of ten bytes
    entries = [
        field(1, field(1, name) + field(2, feature))
        for name, feature in ((b"packed", packed), (b"single", single), (b"whole", whole))
    ]
    path = write_records(tmp_path / "x.tfrecord", field(1, b"".join(entries)))
    (example,) = read_examples(path)
    assert example.numbers["packed"].tolist() == example.numbers["single"].tolist() == [1.5, -2.0]
    assert example.numbers["whole"].tolist() == [3, -1]


def test_a_record_that_is_cut_off_is_named(tmp_path: Path) -> None:
    root = copy_rlds(tmp_path / "set")
    (stored,) = root.rglob("*.tfrecord*")
    stored.write_bytes(stored.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"tfrecord-00000-of-00001: record 1 has \d+ bytes, and"):
        open_dataset(root)


def test_an_episode_without_actions_is_named(tmp_path: Path) -> None:
    steps = field(1, field(1, b"steps/is_first") + field(2, field(3, field(1, b"\x01\x00"))))
    write_records(tmp_path / "x.tfrecord", field(1, steps))
    with pytest.raises(DataError, match=r"record 0 has no numbers 'steps/action'"):
        open_dataset(tmp_path)
