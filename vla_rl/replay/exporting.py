"""A replay buffer's episodes as a LeRobotDataset, one frame a decision.

    action, next.reward, intervened            the row's action, the sum of its rewards, whether an expert chose
    observation.state, observation.features, observation.reference    proprioception, features, the base's chunk

Rows have no images, so the data set has none.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.datasets.opening import DECIDED_BY
from vla_rl.replay.segments import SegmentHeader, list_segments, read_segment, require_layout
from vla_rl.util.ownership import name_lock_file, sole_owner


def export_lerobot(folder: Path, target: Path, *, fps: float = 1.0) -> int:
    """Write all segments of a folder to a LeRobotDataset; return its new episodes.

    Episodes that the data set has already are left out, so that an export can be repeated.

    Args:
        folder: the folder of a replay buffer.
        target: the data set, made if it does not exist.
        fps: decisions a second; rows do not record how long one took.

    Raises: DataError for a damaged segment, for one of another policy than the first, and for a data
        set with other features; ConfigError if another process writes the data set; OSError.
    """
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with sole_owner(name_lock_file(target), f"the data set {target}"):
        writer = LeRobotWriter(target, fps=fps)
        known, added, layout = writer.names, 0, None
        for path in list_segments(folder):
            header, _, rows = read_segment(path)
            layout = layout or header.layout
            require_layout(path, header, layout)
            for episode in split_episodes(header, rows):
                if episode.name not in known:
                    writer.add_episode(episode)
                    added += 1
    return added


def split_episodes(header: SegmentHeader, rows: np.ndarray) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a segment, one control step for each decision."""
    starts = np.flatnonzero(rows["decision"] == 0)
    for part in np.split(rows, starts[1:]):
        vectors = {"state": part["proprio"]} if header.layout.proprio else {}
        vectors |= {"features": part["features"], "reference": part["reference"]}
        number, task = int(part["episode"][0]), header.tasks[int(part["task"][0])]
        yield RecordedEpisode(
            name=f"{header.source}/{number}",
            instruction=task,
            actions=part["action"],
            vectors={name: values.astype(np.float32) for name, values in vectors.items()},
            frames={},
            has_gripper=False,
            rewards=part["rewards"].sum(axis=1),
            intervened=np.asarray(part["intervened"].any(axis=1)),
            is_success=bool(part["is_success"][-1]),
            about={
                "task": task,
                "episode": number,
                DECIDED_BY: int(part["head_version"][0]),
                "is_demonstration": header.is_demonstration,
            },
        )
