"""Checkpoints of a run: the policy, its optimizer, random states, and all other state that the
caller needs to continue.

    <root>/update-000012/policy/{model.safetensors, config.json, ...}   loadable by itself, as a policy's checkpoint
                         optimizer.safetensors, rng.safetensors, critic.safetensors (with a critic)
                         agents/<name>/{policy, optimizer, ...}          instead of both, if several policies learn
                         parts/<name>.msgpack                            data cursor, buffered groups, ...
                         metrics.jsonl                                   lines of metrics without another place
                         manifest.json                                   last: a folder without it is no checkpoint

Checkpoints appear complete or not at all (`atomic_folder`), contain no pickle, and are verified
byte by byte before use.
"""

import asyncio
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import (
    HEADER,
    CheckpointHeader,
    free_name,
    prune,
    read_header,
    remove_leftovers,
    update_in_name,
)
from vla_rl.learner.checkpoint.state import StagedTensors, TeamState, TrainingState, pack, unpack
from vla_rl.types import SOLE_MEMBER
from vla_rl.util.arrays import require_finite
from vla_rl.util.atomic_files import MANIFEST, FileEntry, FolderWriter, verify_folder
from vla_rl.util.tasks import await_end, run_in_thread

T = TypeVar("T")

FORMAT: Final = 1
POLICY_TENSORS: Final = "policy/model.safetensors"
POLICY_CONFIG: Final = "config.json"
OPTIMIZER_TENSORS: Final = "optimizer.safetensors"
RNG_TENSORS: Final = "rng.safetensors"
CRITIC_TENSORS: Final = "critic.safetensors"
METRICS: Final = "metrics.jsonl"
MARGIN_BYTES: Final = 1 << 20
"""Bytes reserved for headers and the manifest, beyond the data itself."""

_PART_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


class Checkpoint:
    """A complete, verified checkpoint on disk."""

    def __init__(
        self,
        folder: Path,
        state: TeamState,
        part_names: frozenset[str],
        metrics: bytes = b"",
    ) -> None:
        self.folder, self.state, self.part_names = folder, state, part_names
        self._decoded: dict[str, tuple[object, object]] = {}
        self.metrics = metrics
        """Lines of metrics stored with the checkpoint, because the run's own file had no place for
        them."""

    @property
    def policy_folder(self) -> Path:
        """Folder of the policy alone, in its family's own layout; for several policies see
        `agents/<name>/policy` in `folder`."""
        return self.folder / "policy"

    def part(self, name: str, type: type[T]) -> T:
        """Read a part that was given to `save_checkpoint`. Raises: CheckpointError if it is
        missing, or not of this `type`."""
        if name not in self.part_names:
            raise CheckpointError(
                f"{self.folder} has no part {name!r}; it has {sorted(self.part_names)}."
            )
        found, kind = self._decoded.get(name, (None, None))
        if kind is not type:
            found = load_part(self.folder, name, type)
            self._decoded[name] = found, type
        return cast("T", found)


class PreparedCheckpoint:
    """A checkpoint that is written and synced, but invisible to readers before `commit`."""

    def __init__(self, writer: FolderWriter) -> None:
        self._writer = writer

    async def commit(
        self, *, keep_last: int | None = None, keep: Collection[int] = (), metrics: bytes = b""
    ) -> Path:
        """Make it visible, and return its folder; then remove all but the newest `keep_last`
        checkpoints.

        Args:
            keep_last: number of checkpoints to keep; None keeps all.
            keep: updates whose checkpoints are kept besides.
            metrics: lines of metrics to store with it, because the run's own file has no place for
                them.

        Raises: CheckpointError if it could not be written; then nothing of it is left.
        """
        return await run_in_thread(_commit, self._writer, keep_last, metrics, keep)

    async def discard(self) -> None:
        """Remove the checkpoint, unless it was committed."""
        await run_in_thread(self._writer.discard)


async def prepare_checkpoint(
    root: Path, state: TeamState, parts: Mapping[str, object]
) -> PreparedCheckpoint:
    """Write a checkpoint off the event loop, up to the step that makes it visible. Arguments and
    errors as in `save_checkpoint`."""
    _require_plain_names((*parts, *state.members))
    # a thread cannot be cancelled: the folder that it goes on to write has to be removed all
    # the same
    writing = asyncio.ensure_future(asyncio.to_thread(_prepare, root, state, parts))
    try:
        return PreparedCheckpoint(await await_end(writing))
    except asyncio.CancelledError:
        # no caller is left to commit it
        if not writing.cancelled() and writing.exception() is None:
            await run_in_thread(writing.result().discard)
        raise


async def save_checkpoint(
    root: Path,
    state: TeamState,
    parts: Mapping[str, object],
    *,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint off the event loop and return its folder; then remove all but the newest
    `keep_last` checkpoints.

    `root` belongs to one run: files that an earlier crash left half-written there are removed
    first. `parts` are packed in a thread: pass values that do not change until this returns, such
    as frozen structs. If the version was saved before, the new checkpoint is written beside the old
    one, as `update-000012-1`, and counts as newer.

    Raises: CheckpointError if it could not be written, for example on a full disk: older
    checkpoints stay, and nothing half-written is visible. TypeError for a part that cannot be
    packed.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}, expected at least 1, or None to keep all.")
    _require_plain_names((*parts, *state.members))
    return await run_in_thread(_save, root, state, parts, keep_last)


async def load_checkpoint(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint off the event loop. Raises: CheckpointError if it is
    half-written, damaged or renamed."""
    return await run_in_thread(_load, folder)


async def verify_checkpoint(folder: Path) -> int:
    """Check every byte of a checkpoint off the event loop, and return its weight version.

    Raises: as `load_checkpoint`.
    """
    return (await run_in_thread(_verified, folder))[0].weight_version


async def read_part(folder: Path, name: str, type: type[T]) -> T:
    """Read one part of a checkpoint off the event loop, without verifying the others.

    Raises: CheckpointError if it is missing, or not of this `type`.
    """
    return await run_in_thread(load_part, folder, name, type)


def read_policy_tensors(folder: Path, agent: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a policy from a checkpoint, verified byte by byte.

    Args:
        folder: the checkpoint, such as `latest_checkpoint` returns.
        agent: name of the agent, if several policies learn.

    Raises: CheckpointError if it is damaged, or has numbers that are not finite.
    """
    _, entries = _verified(folder)
    return _finite(
        folder, entries, ("" if agent is None else _agent_folder(agent)) + POLICY_TENSORS
    )


def load_part(folder: Path, name: str, type: type[T]) -> T:
    """Read one part of a checkpoint, as `read_part` does. Blocks: call it in a thread."""
    try:
        return unpack((folder / _part_file(name)).read_bytes(), type)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"part {name!r} of {folder} cannot be read: {error}; the checkpoint is damaged, take "
            "an older one."
        ) from error


def _prepare(root: Path, state: TeamState, parts: Mapping[str, object]) -> FolderWriter:
    packed = {name: pack(part) for name, part in parts.items()}
    try:
        remove_leftovers(root)
        folder = free_name(root, state.weight_version)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be written: {error}") from error
    writer = FolderWriter(folder, _num_bytes(state, packed))
    try:
        with writer.explained():
            _write(writer, state, packed)
        writer.seal()
    except BaseException:
        writer.discard()
        raise
    return writer


def _commit(
    writer: FolderWriter,
    keep_last: int | None,
    metrics: bytes = b"",
    keep: Collection[int] = (),
) -> Path:
    try:
        if metrics:
            with writer.explained():
                writer.write_bytes(METRICS, metrics)
        folder = writer.commit()
    finally:
        writer.discard()
    # last: a kill in between leaves a checkpoint too many, never one too few
    if keep_last is not None:
        prune(folder.parent, keep_last, keep)
    return folder


def _save(root: Path, state: TeamState, parts: Mapping[str, object], keep_last: int | None) -> Path:
    return _commit(_prepare(root, state, parts), keep_last)


def _require_plain_names(names: Iterable[str]) -> None:
    for name in names:
        if not _PART_NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!r} of a part or agent is not a word of letters, "
                "digits, '-' and '_'."
            )


def _write(writer: FolderWriter, state: TeamState, packed: Mapping[str, bytes]) -> None:
    for below, each in _by_folder(state).items():
        _write_tensors(writer, f"{below}{POLICY_TENSORS}", each.policy)
        for name, data in each.policy_files.items():
            writer.write_bytes(f"{below}policy/{name}", data)
        _write_tensors(writer, f"{below}{OPTIMIZER_TENSORS}", each.optimizer)
        writer.write_tensors(f"{below}{RNG_TENSORS}", each.rng)
    if state.critic:
        _write_tensors(writer, CRITIC_TENSORS, state.critic)
    for name, data in packed.items():
        writer.write_bytes(_part_file(name), data)
    agents = () if state.agent_names.acts_for_all else state.agent_names.names
    writer.write_bytes(
        HEADER, msgspec.json.encode(CheckpointHeader(FORMAT, state.weight_version, agents))
    )


def _write_tensors(
    writer: FolderWriter, name: str, tensors: Mapping[str, Tensor] | StagedTensors
) -> None:
    if isinstance(tensors, StagedTensors):
        tensors.write_file(writer.new_path(name))
    else:
        writer.write_tensors(name, tensors)


def _verified(folder: Path) -> tuple[CheckpointHeader, dict[str, FileEntry]]:
    entries = verify_folder(folder)
    _require_listed(folder, entries, HEADER)
    header = read_header(folder)
    if header.format != FORMAT:
        raise CheckpointError(f"{folder} has format {header.format}, expected {FORMAT}.")
    # a renamed folder was once taken for the newest checkpoint
    if update_in_name(folder) not in (None, header.weight_version):
        raise CheckpointError(
            f"{folder} is named for update {update_in_name(folder)}, but its {HEADER} says "
            f"{header.weight_version}; give it its own name, update-{header.weight_version:06d}, "
            "or take another one."
        )
    return header, entries


def _load(folder: Path) -> Checkpoint:
    header, entries = _verified(folder)
    try:
        critic_file = folder / CRITIC_TENSORS if (folder / CRITIC_TENSORS).exists() else None
        critic = _finite(folder, entries, CRITIC_TENSORS) if critic_file is not None else {}
        members = {
            agent: _read(folder, entries, header, _agent_folder(agent)) for agent in header.agents
        } or {SOLE_MEMBER: _read(folder, entries, header, "")}
        state = TeamState(members, critic, critic_file)
        metrics = (folder / METRICS).read_bytes() if METRICS in entries else b""
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of a run: {error}") from error
    parts = {Path(name).stem for name in entries if name.startswith("parts/")}
    return Checkpoint(folder, state, frozenset(parts), metrics)


def _read(
    folder: Path, entries: Collection[str], header: CheckpointHeader, below: str
) -> TrainingState:
    """Read one policy and its other state from a subfolder (or "")."""
    start = f"{below}policy/"
    names = [
        name for name in entries if name.startswith(start) and name != f"{below}{POLICY_TENSORS}"
    ]
    files = {name.removeprefix(start): (folder / name).read_bytes() for name in names}
    try:
        json.loads(files.get(POLICY_CONFIG, b"{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / start / POLICY_CONFIG} cannot be read: {error}; the checkpoint is damaged."
        ) from error
    return TrainingState(
        weight_version=header.weight_version,
        policy=_finite(folder, entries, f"{below}{POLICY_TENSORS}"),
        optimizer=_tensors(folder, entries, f"{below}{OPTIMIZER_TENSORS}"),
        rng=_tensors(folder, entries, f"{below}{RNG_TENSORS}"),
        policy_files=files,
        folder=folder / below,
    )


def _finite(folder: Path, entries: Collection[str], name: str) -> dict[str, Tensor]:
    tensors = _tensors(folder, entries, name)
    require_finite(tensors, folder / name)
    return tensors


def _tensors(folder: Path, entries: Collection[str], name: str) -> dict[str, Tensor]:
    _require_listed(folder, entries, name)
    try:
        return load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / name} cannot be read: {error}; the checkpoint is damaged."
        ) from error


def _require_listed(folder: Path, entries: Collection[str], name: str) -> None:
    """Raise CheckpointError if a file is not in the manifest, so that nothing verified it."""
    if name not in entries:
        raise CheckpointError(
            f"{folder / MANIFEST} does not list {name}, which every such checkpoint has; the "
            "checkpoint is damaged, take an older one."
        )


def _by_folder(state: TeamState) -> dict[str, TrainingState]:
    """Return each policy's state by the subfolder that it is written to; a team of one has none."""
    if state.agent_names.acts_for_all:
        return {"": state.only}
    return {_agent_folder(name): each for name, each in state.members.items()}


def _agent_folder(name: str) -> str:
    return f"agents/{name}/"


def _num_bytes(state: TeamState, packed: Mapping[str, bytes]) -> int:
    states = _by_folder(state).values()
    tensors: list[Mapping[str, Tensor] | StagedTensors] = [state.critic]
    for each in states:
        tensors += [each.policy, each.optimizer, each.rng]
    num_tensor_bytes = sum(
        group.nbytes
        if isinstance(group, StagedTensors)
        else sum(tensor.nbytes for tensor in group.values())
        for group in tensors
    )
    files = [*packed.values(), *(data for each in states for data in each.policy_files.values())]
    return num_tensor_bytes + sum(map(len, files)) + MARGIN_BYTES


def _part_file(name: str) -> str:
    return f"parts/{name}.msgpack"
