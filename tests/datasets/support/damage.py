"""Damage to a data set's files, and the whole of what a reader gives, to compare."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from made_datasets import FEATURES, TASKS, columns_of, encode, filmed, hdf5, made_episode, published

from vla_rl.datasets import (
    DatasetOptions,
    LeRobotWriter,
    RecordedEpisode,
    compute_statistics,
    open_dataset,
)

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
        writer.add(made_episode(f"a{number}", 3, seed=number))


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


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "recording": recording,
    "ours": ours,
    "published": published,
    "version 2.1": version_2,
    "video": film,
    "hdf5": demonstrations,
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
    holder, key = rng.choice(list(_places(value)))
    if rng.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = rng.choice(ODD)
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)
