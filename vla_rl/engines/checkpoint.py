"""Checkpoints of a run: the policy, its optimizer, random states, and whatever else the caller has to go on from.

    <root>/update-000012/policy/{model.safetensors, config.json, ...}   loadable by itself, as a policy's checkpoint
                         optimizer.safetensors, rng.safetensors, critic.safetensors (where there is a critic)
                         agents/<name>/{policy, optimizer, ...}          instead of both, where several policies learn
                         parts/<name>.msgpack                            data cursor, buffered groups, ...
                         manifest.json                                   written last: without it, not a checkpoint

They appear whole or not at all (`atomic_folder`), hold no pickle, and are checked byte by byte before they are used.
"""

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vla_rl.engines.atomic_folder import MANIFEST, WRITING, FolderWriter, verify_folder, writing_folder
from vla_rl.engines.packing import pack, unpack
from vla_rl.engines.threads import run_to_its_end
from vla_rl.engines.training import TeamState, TrainingState
from vla_rl.errors import CheckpointError

T = TypeVar("T")

FORMAT: Final = 1
HEADER: Final = "checkpoint.json"
POLICY_TENSORS: Final = "policy/model.safetensors"
OPTIMIZER_TENSORS: Final = "optimizer.safetensors"
RNG_TENSORS: Final = "rng.safetensors"
CRITIC_TENSORS: Final = "critic.safetensors"
MARGIN_BYTES: Final = 1 << 20
"""Room for headers and the manifest, beyond the data itself."""

_NAME: Final = re.compile(r"update-(\d{6,})(?:-(\d+))?")
_PART_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


class _Header(msgspec.Struct, frozen=True, omit_defaults=True):
    format: int
    weight_version: int
    agents: tuple[str, ...] = ()
    """Where several policies learn, whose they are."""


class Checkpoint:
    """A whole, verified checkpoint on disk."""

    def __init__(self, folder: Path, state: TrainingState | TeamState, part_names: frozenset[str]) -> None:
        self.folder, self.state, self.part_names = folder, state, part_names

    @property
    def policy_folder(self) -> Path:
        """The policy alone, in its family's own layout; of several, see `agents/<name>/policy` in the folder."""
        return self.folder / "policy"

    def part(self, name: str, type: type[T]) -> T:
        """A part that was handed to `save_checkpoint`. Raises: CheckpointError where it is not there, or no `type`."""
        if name not in self.part_names:
            raise CheckpointError(f"{self.folder} has no part {name!r}; it has {sorted(self.part_names)}.")
        try:
            return unpack((self.folder / _part_file(name)).read_bytes(), type)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"part {name!r} of {self.folder} cannot be read: {error}") from error


async def save_checkpoint(
    root: Path, state: TrainingState | TeamState, parts: Mapping[str, object], *, keep_last: int | None = None
) -> Path:
    """Write a checkpoint off the loop and return its folder; then remove all but the newest `keep_last`.

    `root` belongs to one run: what an earlier crash left half-written there is removed first.
    `parts` are packed in a thread: hand over values that nobody changes until this returns, such as frozen structs.
    A version that was saved before is saved beside it, under `update-000012-1`, and counts as newer.

    Raises: CheckpointError where it could not be written (a full disk, say): older checkpoints stay, nothing half-written
        shows. TypeError for a part that cannot be packed.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}, expected at least 1, or None to keep all.")
    for name in (*parts, *(state.members if isinstance(state, TeamState) else ())):
        if not _PART_NAME.fullmatch(name):
            raise ValueError(f"the name {name!r} of a part or agent is not a word of letters, digits, '-' and '_'.")
    return await run_to_its_end(_save, root, state, parts, keep_last)


async def load_checkpoint(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint off the loop. Raises: CheckpointError where it is half-written or damaged."""
    return await run_to_its_end(_load, folder)


def list_checkpoints(root: Path) -> list[Path]:
    """Completed checkpoints below `root`, oldest first; half-written ones are not among them."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in folders if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()), key=_age)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest completed checkpoint below `root`, or None."""
    checkpoints = list_checkpoints(root)
    return checkpoints[-1] if checkpoints else None


def _save(root: Path, state: TrainingState | TeamState, parts: Mapping[str, object], keep_last: int | None) -> Path:
    packed = {name: pack(part) for name, part in parts.items()}
    _remove_what_a_crash_left(root)
    folder = _free_name(root, state.weight_version)
    with writing_folder(folder, _num_bytes(state, packed)) as writer:
        _write(writer, state, packed)
    if keep_last is not None:
        for old in list_checkpoints(root)[:-keep_last]:
            _remove(old)
    return folder


def _write(writer: FolderWriter, state: TrainingState | TeamState, packed: Mapping[str, bytes]) -> None:
    for below, each in _by_folder(state).items():
        writer.write_tensors(f"{below}{POLICY_TENSORS}", each.policy)
        for name, data in each.policy_files.items():
            writer.write_bytes(f"{below}policy/{name}", data)
        writer.write_tensors(f"{below}{OPTIMIZER_TENSORS}", each.optimizer)
        writer.write_tensors(f"{below}{RNG_TENSORS}", each.rng)
    if state.critic:
        writer.write_tensors(CRITIC_TENSORS, state.critic)
    for name, data in packed.items():
        writer.write_bytes(_part_file(name), data)
    agents = tuple(state.members) if isinstance(state, TeamState) else ()
    writer.write_bytes(HEADER, msgspec.json.encode(_Header(FORMAT, state.weight_version, agents)))


def _load(folder: Path) -> Checkpoint:
    entries = verify_folder(folder)
    try:
        header = msgspec.json.decode((folder / HEADER).read_bytes(), type=_Header)
        if header.format != FORMAT:
            raise CheckpointError(f"{folder} has format {header.format}, expected {FORMAT}.")
        critic = load_file(folder / CRITIC_TENSORS) if CRITIC_TENSORS in entries else {}
        state: TrainingState | TeamState
        if header.agents:
            members = {agent: _read(folder, entries, header, _agent_folder(agent)) for agent in header.agents}
            state = TeamState(members, critic)
        else:
            state = replace(_read(folder, entries, header, ""), critic=critic)
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of a run: {error}") from error
    parts = {Path(name).stem for name in entries if name.startswith("parts/")}
    return Checkpoint(folder, state, frozenset(parts))


def _read(folder: Path, entries: Collection[str], header: _Header, below: str) -> TrainingState:
    """One policy and what belongs to it, from a subfolder (or "")."""
    start = f"{below}policy/"
    files = [name for name in entries if name.startswith(start) and name != f"{below}{POLICY_TENSORS}"]
    return TrainingState(
        weight_version=header.weight_version,
        policy=load_file(folder / f"{below}{POLICY_TENSORS}"),
        optimizer=load_file(folder / f"{below}{OPTIMIZER_TENSORS}"),
        rng=load_file(folder / f"{below}{RNG_TENSORS}"),
        policy_files={name.removeprefix(start): (folder / name).read_bytes() for name in files},
    )


def _by_folder(state: TrainingState | TeamState) -> dict[str, TrainingState]:
    """Each policy by the subfolder that it is written to; one alone has none."""
    if isinstance(state, TrainingState):
        return {"": state}
    return {_agent_folder(name): each for name, each in state.members.items()}


def _agent_folder(name: str) -> str:
    return f"agents/{name}/"


def _remove_what_a_crash_left(root: Path) -> None:
    for path in root.iterdir() if root.is_dir() else ():
        is_unfinished = path.name.startswith(f"{WRITING}update-")
        is_half_removed = _NAME.fullmatch(path.name) is not None and not (path / MANIFEST).exists()
        if is_unfinished or is_half_removed:
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    # first unmade, then deleted: a crash in between leaves something that nobody takes for a checkpoint
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)


def _num_bytes(state: TrainingState | TeamState, packed: Mapping[str, bytes]) -> int:
    states = _by_folder(state).values()
    tensors: list[Mapping[str, Tensor]] = [state.critic]
    for each in states:
        tensors += [each.policy, each.optimizer, each.rng]
    num_tensor_bytes = sum(tensor.nbytes for group in tensors for tensor in group.values())
    files = [*packed.values(), *(data for each in states for data in each.policy_files.values())]
    return num_tensor_bytes + sum(map(len, files)) + MARGIN_BYTES


def _part_file(name: str) -> str:
    return f"parts/{name}.msgpack"


def _free_name(root: Path, weight_version: int) -> Path:
    name = f"update-{weight_version:06d}"
    folder, again = root / name, 0
    while folder.exists():
        again += 1
        folder = root / f"{name}-{again}"
    return folder


def _age(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
