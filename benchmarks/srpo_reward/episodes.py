"""The recorded episodes of the study: on disk, and as the trajectories that rewards are computed
from.

    episodes.npz   per moment: hand state, true progress; per episode: task, start, kind, success
    frames.mp4     the fixed camera's frames, episode after episode (H.264, so slightly lossy)

A moment is every fourth control step, from the first frame to the last one.
"""

import subprocess
from pathlib import Path

import imageio_ffmpeg
import msgspec
import numpy as np

from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Group, Step, StopReason, Trajectory

STEPS_PER_MOMENT = 4
DATA = Path(__file__).parent / "data"
"""LIBERO's own assets, tasks 2, 4, 6 and 9 of libero_object, recorded after the rule was
finished. `data_of_development` beside it has the episodes that the rule was made on."""


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded episode of T moments."""

    task: str
    init_state_id: int

    kind: str
    """Kind of actor: `expert`, `stalled`, `dropped`, `empty`, `lost` or `policy`."""

    is_success: bool

    frames: np.ndarray
    """uint8 [T, S, S, 3], the fixed camera."""

    states: np.ndarray
    """float32 [T, 8], LIBERO's proprioception."""

    progress: np.ndarray
    """float32 [T], true progress in [0, 1] of each moment, from the simulator's hidden state."""

    @property
    def furthest(self) -> float:
        """The largest progress at any moment: the true progress of the episode."""
        return float(self.progress.max())

    @property
    def final(self) -> float:
        """The progress at the end."""
        return float(self.progress[-1])


def save_episodes(episodes: list[Episode], folder: Path = DATA) -> int:
    """Write both files and return their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(episode.frames) for episode in episodes]
    np.savez_compressed(
        folder / "episodes.npz",
        allow_pickle=False,
        image_size=np.array(episodes[0].frames.shape[1]),
        length=np.array(lengths, np.int32),
        task=np.array([episode.task for episode in episodes]),
        init_state_id=np.array([episode.init_state_id for episode in episodes], np.int32),
        kind=np.array([episode.kind for episode in episodes]),
        is_success=np.array([episode.is_success for episode in episodes]),
        states=np.concatenate([episode.states for episode in episodes]),
        progress=np.concatenate([episode.progress for episode in episodes]),
    )
    _encode(np.concatenate([episode.frames for episode in episodes]), folder / "frames.mp4")
    return sum((folder / name).stat().st_size for name in ("episodes.npz", "frames.mp4"))


def load_episodes(folder: Path = DATA) -> list[Episode]:
    """Load every recorded episode.

    Raises: FileNotFoundError if a file is missing; ValueError if the files do not match.
    """
    for name in ("episodes.npz", "frames.mp4"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} is missing; run `python -m benchmarks.srpo_reward --record`."
            )
    table = np.load(folder / "episodes.npz", allow_pickle=False)
    frames = _decode(folder / "frames.mp4", int(table["image_size"]))
    ends = np.cumsum(table["length"])
    if ends[-1] != len(frames):
        raise ValueError(
            f"{folder} holds {len(frames)} frames for {ends[-1]} moments; record it again."
        )
    cuts = [np.split(array, ends[:-1]) for array in (frames, table["states"], table["progress"])]
    return [
        Episode(
            task=str(table["task"][row]),
            init_state_id=int(table["init_state_id"][row]),
            kind=str(table["kind"][row]),
            is_success=bool(table["is_success"][row]),
            frames=images,
            states=states,
            progress=progress,
        )
        for row, (images, states, progress) in enumerate(zip(*cuts, strict=True))
    ]


def _encode(frames: np.ndarray, path: Path) -> None:
    """Encode uint8 [N, S, S, 3], S even, as H.264.

    One thread, so that the same frames give the same bytes.
    """
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    given = [
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        size,
        "-r",
        str(20 // STEPS_PER_MOMENT),
        "-i",
        "-",
    ]
    wanted = [
        "-c:v",
        "libx264",
        "-crf",
        "24",
        "-preset",
        "veryslow",
        "-pix_fmt",
        "yuv420p",
        "-threads",
        "1",
    ]
    _ffmpeg(*given, *wanted, "-y", str(path), stdin=frames.tobytes())


def _decode(path: Path, size: int) -> np.ndarray:
    """Decode uint8 [N, S, S, 3], every frame once."""
    raw = _ffmpeg("-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-threads", "1", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, size, size, 3)


def _ffmpeg(*arguments: str, stdin: bytes = b"") -> bytes:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *arguments]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=True).stdout


def as_groups(episodes: list[Episode]) -> list[tuple[Group, list[Episode]]]:
    """Group episodes by task, start and kind of actor (policy or scripted), in order of
    appearance.
    """
    members: dict[tuple[str, int, bool], list[Episode]] = {}
    for episode in episodes:
        members.setdefault(
            (episode.task, episode.init_state_id, episode.kind == "policy"), []
        ).append(episode)
    groups, next_id = [], 0
    for group_id, of_group in enumerate(members.values()):
        trajectories = tuple(
            as_trajectory(episode, next_id + member, group_id, member)
            for member, episode in enumerate(of_group)
        )
        next_id += len(of_group)
        groups.append(
            (Group(group_id=group_id, trajectories=trajectories, dispatch_version=0), of_group)
        )
    return groups


def as_trajectory(episode: Episode, episode_id: int, group_id: int, member: int) -> Trajectory:
    """Return the trajectory that a rollout would have made: one decision for each moment except the
    last.
    """
    # the wrist camera was not recorded; a policy that uses it gets black frames
    black = np.zeros_like(episode.frames[0])
    observations = [
        {"image": frame, "wrist_image": black, "state": state, "instruction": episode.task}
        for frame, state in zip(episode.frames, episode.states, strict=True)
    ]
    chunk = ActionChunk(
        actions=np.zeros((STEPS_PER_MOMENT, 7), np.float32),
        tokens=np.zeros(STEPS_PER_MOMENT * 7, np.int64),
        log_probs=np.zeros(STEPS_PER_MOMENT * 7, np.float32),
        weight_version=0,
    )
    rewards = np.zeros(STEPS_PER_MOMENT, np.float32)
    spec = EpisodeSpec(
        episode_id=episode_id,
        group_id=group_id,
        member=member,
        env=EnvSpec(id="vla_rl/libero_object-v0"),
        task=episode.task,
        seed=0,
        policy_seed=member,
        options={"init_state_id": episode.init_state_id},
    )
    return Trajectory(
        episode=spec,
        steps=tuple(
            Step(observation=seen, chunk=chunk, rewards=rewards) for seen in observations[:-1]
        ),
        final_observation=observations[-1],
        stop_reason=StopReason.SUCCESS if episode.is_success else StopReason.TIME_LIMIT,
    )
