"""Data sets as others publish them, written by h5py and pyarrow alone, episodes to write, and damage
to their files.
"""

import copy
import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from imageio_ffmpeg import get_ffmpeg_exe

from vla_rl.datasets import (
    DatasetOptions,
    LeRobotWriter,
    RecordedEpisode,
    compute_statistics,
    open_dataset,
)


def frames(seed: int, num: int, size: int = 12) -> np.ndarray:
    """uint8 [num, size, size, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), dtype=np.uint8)


def made_episode(
    name: str, num_steps: int = 5, seed: int = 0, instruction: str = "push the plate"
) -> RecordedEpisode:
    """An episode of random numbers and frames."""
    rng = np.random.default_rng(seed)
    image, wrist = frames(seed, num_steps), frames(seed + 100, num_steps)
    return RecordedEpisode(
        name=name,
        instruction=instruction,
        actions=rng.uniform(-1, 1, (num_steps, 7)).astype(np.float32),
        vectors={"state": rng.normal(size=(num_steps, 8)).astype(np.float32)},
        frames={"image": image.__getitem__, "wrist_image": wrist.__getitem__},
        rewards=np.array([0.0] * (num_steps - 1) + [1.0], np.float32),
        is_success=True,
        about={"task": "libero_goal/5", "init_state_id": 3},
    )


def hdf5(
    path: Path, demos: dict[str, np.ndarray], *, instruction: str | None = "push the plate"
) -> dict[str, np.ndarray]:
    """LIBERO's layout; `demos` are their actions [T, 7].

    Returns the frames of the fixed camera, as stored.
    """
    stored = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        if instruction is not None:
            data.attrs["problem_info"] = json.dumps({"language_instruction": [f'"{instruction}"']})
        for number, (name, actions) in enumerate(demos.items()):
            num = len(actions)
            stored[name] = frames(number, num)
            demo = data.create_group(name)
            demo["actions"] = actions.astype(np.float64)
            demo["rewards"] = np.zeros(num, np.uint8)
            observation = demo.create_group("obs")
            observation["agentview_rgb"] = stored[name]
            observation["eye_in_hand_rgb"] = frames(number + 50, num)
            observation["ee_pos"] = np.arange(3.0 * num).reshape(num, 3)
            observation["ee_ori"] = np.arange(3.0 * num).reshape(num, 3) + 100
            observation["gripper_states"] = np.arange(2.0 * num).reshape(num, 2) + 200
    return stored


def _png(frame: np.ndarray) -> dict[str, Any]:
    return {"bytes": bytes(cv2.imencode(".png", frame[..., ::-1])[1]), "path": "frame.png"}


def columns_of(episode: int, num: int, first: int, task: int) -> dict[str, list[Any]]:
    """Rows of an episode, as the published `libero` data have them; numbers tell where they are."""
    steps = range(num)
    return {
        "observation.images.image": [_png(frame) for frame in frames(episode, num)],
        "observation.images.image2": [_png(frame) for frame in frames(episode + 50, num)],
        "observation.state": [[float(episode)] * 7 + [float(step)] for step in steps],
        "action": [[0.1 * step] * 6 + [-1.0 if step == 0 else 1.0] for step in steps],
        "timestamp": [step / 10 for step in steps],
        "frame_index": list(steps),
        "episode_index": [episode] * num,
        "index": [first + step for step in steps],
        "task_index": [task] * num,
    }


FEATURES = {
    "observation.images.image": {
        "dtype": "image",
        "shape": [12, 12, 3],
        "names": ["height", "width", "channel"],
    },
    "observation.images.image2": {
        "dtype": "image",
        "shape": [12, 12, 3],
        "names": ["height", "width", "channel"],
    },
    "observation.state": {"dtype": "float32", "shape": [8], "names": ["state"]},
    "action": {"dtype": "float32", "shape": [7], "names": ["actions"]},
    **{
        name: {"dtype": kind, "shape": [1], "names": None}
        for name, kind in {
            "timestamp": "float32",
            "frame_index": "int64",
            "episode_index": "int64",
        }.items()
    },
}
TASKS = {0: "open the drawer", 1: "close the drawer"}


def published(root: Path, lengths: tuple[int, ...] = (3, 4), **changed: Any) -> Path:
    """A v3.0 data set: all episodes in one file of two-row groups, task k % 2.

    `changed` replaces fields of info.json.
    """
    info = {
        "codebase_version": "v3.0",
        "robot_type": "panda",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": 2,
        "chunks_size": 1000,
        "fps": 10.0,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": FEATURES,
        **changed,
    }
    for folder in ("data/chunk-000", "meta/episodes/chunk-000"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    rows: dict[str, list[Any]] = {}
    about = []
    first = 0
    for number, num in enumerate(lengths):
        for name, values in columns_of(number, num, first, number % 2).items():
            rows.setdefault(name, []).extend(values)
        about.append({"episode_index": number, "tasks": [TASKS[number % 2]], "length": num})
        first += num
    pq.write_table(pa.table(rows), root / "data/chunk-000/file-000.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist(about), root / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": list(TASKS), "__index_level_0__": list(TASKS.values())})
    pq.write_table(tasks, root / "meta/tasks.parquet")
    return root


def change_rows(root: Path, change: Any) -> None:
    """Rewrite the data file of `published` with `change(rows)`, rows as plain values."""
    path = root / "data/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


CAMERA = "observation.images.image"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def encode(path: Path, numbers: Sequence[int], *options: str, fps: float = 10.0) -> None:
    """A video of 32 x 64 pixels; frame k is grey, 8 times `numbers[k]`. `options` are ffmpeg's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = b"".join(np.full((32, 64, 3), 8 * number, np.uint8).tobytes() for number in numbers)
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", "64x32", "-r", f"{fps}", "-i", "-", *options]
    codec = [] if "-c:v" in options else ["-c:v", "libx264", "-pix_fmt", "yuv420p"]
    subprocess.run([*command, *codec, str(path)], input=grey, check=True)


def filmed(
    root: Path,
    lengths: tuple[int, ...] = (10,),
    *,
    begins_s: Sequence[float] | None = None,
    camera: str = CAMERA,
    described: Any = None,
) -> Path:
    """A v3.0 data set of 10 frames a second whose one camera is a video; returns the file to write.

    `begins_s`: time of each episode in it, one after the other by default; `described` replaces
    fields of the camera's description.
    """
    video = {"dtype": "video", "shape": [32, 64, 3], "names": ["height", "width", "channels"]}
    features = {name: value for name, value in FEATURES.items() if "images" not in name}
    published(
        root,
        lengths,
        features={**features, camera: {**video, **(described or {})}},
        video_path=VIDEO_PATH,
    )
    begins = begins_s or [sum(lengths[:number]) / 10 for number in range(len(lengths))]
    about = [
        {
            "episode_index": number,
            f"videos/{camera}/chunk_index": 0,
            f"videos/{camera}/file_index": 0,
            f"videos/{camera}/from_timestamp": begin,
        }
        for number, begin in enumerate(begins)
    ]
    pq.write_table(pa.Table.from_pylist(about), root / "meta/episodes/chunk-000/file-000.parquet")
    path = root / VIDEO_PATH.format(video_key=camera, chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def shown(episode: RecordedEpisode, key: str = "image") -> list[int]:
    """The numbers of the frames that the rows of an episode show, as `encode` numbered them."""
    return [round(float(episode.frames[key](step).mean()) / 8) for step in range(episode.num_steps)]


ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        7,
        2**31,
        2**63,
        -(2**70),
        1e300,
        0.5,
        "",
        "x",
        "action",
        "observation.",
    ),
    *([], [[]], [None], {}, {"a": 1}, "{video_key}", "{", "../..", "video", "image", "float32"),
)
"""Values that somebody may have written into a field of JSON."""


def recording(root: Path) -> None:
    """Our own .npz."""
    episode = made_episode("a", 3)
    root.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        root / "0000.npz",
        image=np.stack([episode.frames["image"](step) for step in range(3)]),
        state=episode.vectors["state"],
        action=episode.actions,
        instruction=np.array("push"),
        task=np.array("libero_goal/5"),
        init_state_id=np.array(3),
        is_success=np.array(True),
    )


def ours(root: Path) -> None:
    """A LeRobotDataset of our own writer."""
    writer = LeRobotWriter(root)
    for number in range(2):
        writer.add_episode(made_episode(f"a{number}", 3, seed=number))


def version_2(root: Path) -> None:
    """A LeRobotDataset v2.1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    info = {
        "codebase_version": "v2.1",
        "total_episodes": 2,
        "total_frames": 5,
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": FEATURES,
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    tasks = [{"task_index": key, "task": text} for key, text in TASKS.items()]
    about = [{"episode_index": k, "tasks": [TASKS[k]], "length": k + 2} for k in range(2)]
    for name, rows in (("tasks", tasks), ("episodes", about)):
        (root / f"meta/{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    for number, num in enumerate((2, 3)):
        table = pa.table(columns_of(number, num, 2 * number, number))
        pq.write_table(table, root / f"data/chunk-000/episode_{number:06d}.parquet")


def film(root: Path) -> None:
    """A LeRobotDataset with a video."""
    encode(filmed(root, (4, 6)), range(10))


def demonstrations(root: Path) -> None:
    """LIBERO's HDF5."""
    rng = np.random.default_rng(0)
    actions = {f"demo_{number}": rng.uniform(-1, 1, (3, 7)) for number in range(2)}
    hdf5(root / "push_demo.hdf5", actions)


RLDS = Path(__file__).parents[1] / "data" / "rlds"


def copy_rlds(root: Path) -> Path:
    """A data set of two episodes that tensorflow_datasets wrote."""
    shutil.copytree(RLDS / "reach_demo", root)
    return root


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "recording": recording,
    "ours": ours,
    "published": published,
    "version 2.1": version_2,
    "video": film,
    "hdf5": demonstrations,
    "rlds": copy_rlds,
}


def everything_in(root: Path) -> list[Any]:
    """All that a data set gives, as plain values."""
    episodes = open_dataset(root, DatasetOptions(gripper="none"))
    compute_statistics(episodes)
    return [_plain(episode) for episode in episodes]


def _plain(episode: RecordedEpisode) -> Any:
    frames = {
        key: [read(step).tolist() for step in range(episode.num_steps)]
        for key, read in episode.frames.items()
    }
    vectors = {key: values.tolist() for key, values in episode.vectors.items()}
    rewards = None if episode.rewards is None else episode.rewards.tolist()
    return [
        episode.step_instructions,
        episode.actions.tolist(),
        vectors,
        frames,
        rewards,
        episode.is_success,
    ]


def damaged(content: bytes, rng: random.Random, *, is_json: bool) -> bytes:
    """The content with a byte flipped, a part zeroed, its end cut off, or a value of JSON changed."""
    kind = rng.randrange(8 if is_json else 4)
    if kind >= 4:
        return _with_odd_value(content, rng)
    at = rng.randrange(len(content))
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(min(16, len(content) - at)) + content[at + 16 :]
    flip = 1 << rng.randrange(8) if kind == 2 else rng.randrange(1, 256)
    return content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]


def _with_odd_value(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines() if content.count(b"\n{") else [content]
    number = rng.randrange(len(lines))
    value = copy.deepcopy(json.loads(lines[number]))
    holder, key = rng.choice(list(_items(value)))
    if rng.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = rng.choice(ODD)
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield value, key
        if isinstance(each, dict | list):
            yield from _items(each)
