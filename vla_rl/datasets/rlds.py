"""RLDS data sets as TensorFlow Datasets stores them: one `tf.train.Example` an episode.

    <name>/1.0.0/features.json                                    recognises the folder
    <name>/1.0.0/dataset_info.json                                how many episodes each file has
    <name>/1.0.0/<name>-train.tfrecord-00000-of-00016             episodes
        steps/action                              float32 [T * D], in the environment's units
        steps/observation/image, ...              T encoded images (JPEG or PNG) a camera
        steps/observation/state, ...              float32 [T * D] a vector
        steps/language_instruction                T texts
        steps/reward, steps/is_first              [T]

These are the layouts of OpenVLA's `modified_libero_rlds` and of Open X-Embodiment. Every observation
stands before the action of its own step. Images are not turned: OpenVLA's are turned already, as
`LiberoEnv` shows them.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import FrameReader, RecordedEpisode
from vla_rl.datasets.tf_records import DOWNLOAD_AGAIN, Example, Span, read_examples, read_span
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import find_files, reading

_log = logging.getLogger(__name__)

SHARD: Final = re.compile(
    r"(?P<split>.+)\.tfrecord-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})(?P<end>.*)"
)
"""The name of one of a split's files, and what a download puts behind it."""

FEATURES_FILE: Final = "features.json"
INFO_FILE: Final = "dataset_info.json"
OBSERVATION: Final = "steps/observation/"
INSTRUCTIONS: Final = (
    "steps/language_instruction",
    "steps/observation/natural_language_instruction",
    "steps/observation/language_instruction",
)
IMAGE_BEGINNINGS: Final = (b"\xff\xd8\xff", b"\x89PNG")
"""First bytes of JPEG and of PNG."""

KNOWN_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("image", "image_primary", "image_0"),
    "wrist_image": ("wrist_image", "image_wrist", "hand_image"),
    "state": ("state", "proprio", "EEF_state"),
    "action": ("action",),
}
"""Names of our observation keys in published data sets; other features keep their names."""


class _Split(msgspec.Struct, rename="camel"):
    name: str
    shard_lengths: list[int] = []


class _DatasetInfo(msgspec.Struct):
    splits: list[_Split] = []


def find_rlds_files(path: Path) -> list[Path]:
    """Return the files with episodes of a data set, in order: in the folder or in its only version's.

    Raises: DataError if the folder has several versions.
    """
    folders = [path, *(found.parent for found in find_files(path, f"*/{FEATURES_FILE}"))]
    folders = [folder for folder in folders if (folder / FEATURES_FILE).is_file()]
    if len(folders) > 1:
        raise DataError(
            f"{path} has the versions {', '.join(folder.name for folder in folders)} of a data "
            "set, expected one; name the folder of one of them."
        )
    return find_files(folders[0], "*.tfrecord*") if folders else []


def read_rlds(path: Path, *, fields: Mapping[str, str] | None = None) -> list[RecordedEpisode]:
    """Read the episodes of a data set; images are read on demand.

    Args:
        path: folder of the data set, or of one version of it. Of several splits, `train` is read.
        fields: names of the observations that are `image`, `wrist_image` and `state`, or of the
            action, if they are not the usual ones.

    Raises: DataError, naming the file, the record and the wrong feature.
    """
    asked = dict(fields or {})
    unknown = sorted(set(asked) - set(KNOWN_FIELDS))
    if unknown:
        raise DataError(f"fields name {unknown[0]!r}, expected some of {sorted(KNOWN_FIELDS)}.")
    files = _leave_out_held_out(_leave_out_copies(find_rlds_files(path)))
    _warn_of_missing_shards(files)
    by_file = {file: list(_read_file(file, asked)) for file in files}
    _warn_of_other_lengths({file: len(episodes) for file, episodes in by_file.items()})
    episodes = [episode for episodes in by_file.values() for episode in episodes]
    if not episodes:
        raise DataError(f"{path} holds no episode in {len(files)} files; {DOWNLOAD_AGAIN}.")
    return episodes


def _leave_out_copies(files: Sequence[Path]) -> list[Path]:
    """Return the files without those that a download left beside a whole one, such as NAME.incomplete."""
    names = {file.name for file in files}
    copies = []
    for file in files:
        shard = SHARD.fullmatch(file.name)
        if shard is not None and shard["end"] and file.name.removesuffix(shard["end"]) in names:
            copies.append(file)
            _log.warning("%s is left out: the file without %r is there too.", file, shard["end"])
    return [file for file in files if file not in copies]


def _leave_out_held_out(files: Sequence[Path]) -> list[Path]:
    """Return the files of the split `train` alone, if there are others beside it: what is held out is not learnt."""
    splits = {file: shard["split"] for file in files if (shard := SHARD.fullmatch(file.name))}
    # a name may be that of the split alone, or of the data set and the split
    training = {file for file, split in splits.items() if split.rpartition("-")[2] == "train"}
    others = sorted({split for file, split in splits.items() if file not in training})
    if not training or not others:
        return list(files)
    _log.warning(
        "%s has %s beside the split train, and is read without; to read another one, give a folder that has it "
        "alone, with %s.",
        files[0].parent,
        ", ".join(others),
        FEATURES_FILE,
    )
    return [file for file in files if file in training or file not in splits]


def _warn_of_missing_shards(files: Sequence[Path]) -> None:
    """Log a warning for each split of which some files are not there: a download may have stopped."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        if shard := SHARD.fullmatch(file.name):
            found[shard["split"], int(shard["total"])].add(int(shard["number"]))
    for (split, total), numbers in found.items():
        if len(numbers) < total:
            # counted, not listed: a name may claim any number of files
            first = next(number for number in range(total) if number not in numbers)
            _log.warning(
                "%s has %d of the %d files of %s, and is read without the others, of which %05d is the first; "
                "download it again if you want all episodes.",
                files[0].parent,
                len(numbers),
                total,
                split,
                first,
            )


def _warn_of_other_lengths(num_episodes: Mapping[Path, int]) -> None:
    """Log a warning for each file that has another number of episodes than `dataset_info.json` says: one that was
    cut between two records is a whole file by itself.

    Raises: DataError if that file is none.
    """
    for folder in {file.parent for file in num_episodes}:
        info = folder / INFO_FILE
        if not info.exists():
            continue
        with reading(info, "the description of an RLDS data set", DOWNLOAD_AGAIN):
            # protobuf writes whole numbers of 64 bits as texts
            said = msgspec.json.decode(info.read_bytes(), type=_DatasetInfo, strict=False)
        lengths = {split.name: split.shard_lengths for split in said.splits}
        for file, found in num_episodes.items():
            shard = SHARD.fullmatch(file.name)
            if file.parent != folder or shard is None:
                continue
            of_split = lengths.get(shard["split"].rpartition("-")[2], [])
            number = int(shard["number"])
            # another number of files was written anew, with other lengths
            if number < len(of_split) == int(shard["total"]) and of_split[number] != found:
                _log.warning(
                    "%s has another number of episodes, %d, than %s says, %d; download the file again if you want all "
                    "of them.",
                    file,
                    found,
                    info,
                    of_split[number],
                )


def _read_file(path: Path, fields: Mapping[str, str]) -> Iterator[RecordedEpisode]:
    for number, example in enumerate(read_examples(path)):
        where = f"{path}: record {number}"
        yield _read_episode(path, where, example, fields)


def _read_episode(
    path: Path, where: str, example: Example, fields: Mapping[str, str]
) -> RecordedEpisode:
    num_steps = _count_steps(example, where)
    action = "steps/" + fields.get("action", "action")
    if action not in example.numbers:
        raise DataError(
            f"{where} has no numbers {action!r}, only {sorted(example.numbers)}; an action in parts "
            "has to be joined, or name another feature with fields = {'action': ...}."
        )
    vectors, frames = {}, {}
    for key, name in _name_observations(example, fields, where).items():
        feature = OBSERVATION + name
        if feature in example.numbers:
            vectors[key] = _read_rows(example.numbers[feature], num_steps, f"{where}: {feature!r}")
        elif _holds_images(path, example.spans[feature]):
            frames[key] = _make_reader(path, example.spans[feature], num_steps, where, feature)
    said = _read_instructions(path, example, num_steps, where)
    rewards = example.numbers.get("steps/reward")
    if rewards is not None and len(rewards) != num_steps:
        raise DataError(f"{where} has {len(rewards)} rewards, expected {num_steps}, one a step.")
    return RecordedEpisode(
        name=where,
        instruction=said[0],
        actions=_read_rows(example.numbers[action], num_steps, f"{where}: {action!r}"),
        vectors=vectors,
        frames=frames,
        rewards=None if rewards is None else rewards.astype(np.float32),
        instructions=None if len(set(said)) == 1 else said,
    )


def _count_steps(example: Example, where: str) -> int:
    for name in ("steps/is_first", "steps/is_last", "steps/reward", "steps/discount"):
        if name in example.numbers and len(example.numbers[name]) > 0:
            return len(example.numbers[name])
    raise DataError(
        f"{where} has no steps/is_first, which every episode of RLDS has, only "
        f"{sorted({*example.numbers, *example.spans})}."
    )


def _name_observations(example: Example, fields: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the observation of the record under each of our keys, or under its own name."""
    stored = {
        name.removeprefix(OBSERVATION)
        for name in (*example.numbers, *example.spans)
        if name.startswith(OBSERVATION) and name not in INSTRUCTIONS
    }
    named: dict[str, str] = {}
    for key, usual in KNOWN_FIELDS.items():
        if key == "action":
            continue
        if key in fields and fields[key] not in stored:
            raise DataError(
                f"{where}: fields name {fields[key]!r} for {key!r}, expected one of {sorted(stored)}."
            )
        chosen = fields.get(key) or next((name for name in usual if name in stored), None)
        if chosen is not None:
            named[key] = chosen
    rest = stored - set(named.values())
    return {**{name: name for name in sorted(rest) if name not in named}, **named}


def _read_rows(numbers: np.ndarray, num_steps: int, where: str) -> np.ndarray:
    """Return numbers of an episode as rows, float32 [T, D]."""
    if len(numbers) == 0 or len(numbers) % num_steps:
        raise DataError(
            f"{where} has {len(numbers)} numbers, expected a multiple of the {num_steps} steps."
        )
    return np.array(numbers.reshape(num_steps, -1), np.float32)


def _read_instructions(path: Path, example: Example, num_steps: int, where: str) -> tuple[str, ...]:
    name = next((name for name in INSTRUCTIONS if example.spans.get(name)), None)
    if name is None:
        raise DataError(
            f"{where} has no {INSTRUCTIONS[0]!r}, expected the task in words of each step."
        )
    spans = example.spans[name]
    if len(spans) != num_steps:
        raise DataError(f"{where} has {len(spans)} of {name!r}, expected {num_steps}, one a step.")
    with reading(f"{where}: {name!r}", "texts", DOWNLOAD_AGAIN):
        return tuple(read_span(path, span).decode() for span in spans)


def _holds_images(path: Path, spans: Sequence[Span]) -> bool:
    """Return whether a list of bytes is encoded images, and not texts."""
    if not spans:
        return False
    begin, end = spans[0]
    return read_span(path, (begin, min(end, begin + 4))).startswith(IMAGE_BEGINNINGS)


def _make_reader(
    path: Path, spans: Sequence[Span], num_steps: int, where: str, feature: str
) -> FrameReader:
    if len(spans) != num_steps:
        raise DataError(
            f"{where} has {len(spans)} images of {feature!r}, expected {num_steps}, one a step."
        )
    # an array: as a list of pairs, the places of a million images would take 200 MB
    return partial(_read_frame, path, np.array(spans), f"{where}: {feature!r}")


def _read_frame(path: Path, spans: np.ndarray, where: str, step: int) -> np.ndarray:
    import cv2  # slow to import, needed only for images

    begin, end = spans[step].tolist()
    with reading(f"{where}, step {step}", "a JPEG or PNG image", DOWNLOAD_AGAIN):
        found: Any = cv2.imdecode(np.frombuffer(read_span(path, (begin, end)), np.uint8), 1)
        if found is None:
            raise ValueError("its bytes cannot be decoded")
        return np.ascontiguousarray(found[..., ::-1])
