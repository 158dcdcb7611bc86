"""Files that appear complete or not at all, one by one or as a folder.

A folder is written under another name, synced, then renamed.

    .writing-<name>-<pid>/...   every file written, then synced
    .../manifest.json           written last: size, digest of every file; a folder without it is incomplete
    rename                      to <name>, then the parent folder is synced

A crash leaves at most a `.writing-*` folder, which readers ignore; the next write of the same name
removes it. It is locked while its writer lives: a second writer of the same name is refused.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from safetensors import SafetensorError

from vla_rl.errors import CheckpointError
from vla_rl.util.ownership import lock_folder, unlock_folder

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST: Final = "manifest.json"
WRITING: Final = ".writing-"
DIGEST_BLOCK: Final = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a complete folder.

    Example:
        FileEntry(num_bytes=81920, blake2b="5e1c0b6f0f2f4c1b9a7d3e8c6b2a1f00")
    """

    num_bytes: int
    blake2b: str


class FolderWriter:
    """A folder that is being written.

    Files are added by relative path and become visible with `commit`.

    Args:
        target: the folder; it must not exist, or be empty.
        num_bytes: approximate number of bytes to be written; compared with the free space first.

    Raises: CheckpointError if there is not enough free space, or if `target` exists.
    """

    def __init__(self, target: Path, num_bytes: int) -> None:
        self.target = target.absolute()
        # Beside the target and not in a folder for temporary files: a rename works within one file
        # system only.
        self._folder = self.target.parent / f"{WRITING}{target.name}-{os.getpid()}"
        self._entries: dict[str, FileEntry] = {}
        with self.explained():
            self._lock = _claim(self.target, self._folder, num_bytes)
        _BEING_WRITTEN.add(self._folder)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write one file."""
        self._path(name).write_bytes(data)

    def write_tensors(self, name: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Write one safetensors file, streamed from the tensors' own memory."""
        from safetensors.torch import save_file  # here: files of text are written without torch

        path = self._path(name)
        # with the permissions of any new file; safetensors would make it readable for its owner
        # alone
        path.touch()
        permissions = path.stat().st_mode
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"}
        )
        path.chmod(permissions)

    def new_path(self, name: str) -> Path:
        """Return the path of one file, to be written by the caller before `seal`."""
        return self._path(name)

    def write_torch(self, name: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Write one file in PyTorch's own format, for code that reads nothing else."""
        import torch

        with self._path(name).open("wb") as file:  # torch's own open: RuntimeError on a full disk
            torch.save(
                {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}, file
            )

    def seal(self) -> None:
        """Sync the files written so far to the disk, so that `commit` has little left to do.

        Raises: CheckpointError.
        """
        with self.explained():
            for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
                name = path.relative_to(self._folder).as_posix()
                # Files are sealed once: `seal` runs while the learner goes on, and `commit` reads
                # only what came after it.
                if name not in self._entries:
                    _sync(path)
                    self._entries[name] = FileEntry(path.stat().st_size, digest_file(path))

    def commit(self) -> Path:
        """Make the complete folder visible and return it.

        Raises: CheckpointError; then nothing of the folder is left.
        """
        try:
            self.seal()
            with self.explained():
                _complete(self._folder, self._entries)
                # The rename is what makes it complete; the parent is synced after it, or a power
                # cut could take the name away again.
                os.replace(self._folder, self.target)
            try:
                _sync(self.target.parent)
            except OSError as error:
                raise CheckpointError(
                    f"{self.target} is written, but may not outlive a power cut: {error}"
                ) from error
        finally:
            self.discard()
        return self.target

    def discard(self) -> None:
        """Remove the files, unless the folder was committed."""
        if self._folder not in _BEING_WRITTEN:
            return
        # A disk that is full or gone may refuse this too; the folder is ignored by readers, and the
        # next write removes it.
        shutil.rmtree(self._folder, ignore_errors=True)
        _BEING_WRITTEN.discard(self._folder)
        unlock_folder(self._lock)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert errors on files inside the block to a CheckpointError that names the folder."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self.target} could not be written: {error}; nothing of it was left behind."
            ) from error

    def _path(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


_BEING_WRITTEN: Final[set[Path]] = set()
"""Folders that this process is writing."""


@contextmanager
def writing_folder(target: Path, num_bytes: int) -> Iterator[FolderWriter]:
    """Write the files of `target` inside the context.

    The folder appears if the context is left without an error.

    Args: those of `FolderWriter`.

    Raises: CheckpointError if there is not enough free space, if a write fails, or if `target`
    exists. Nothing of the folder is left.
    """
    writer = FolderWriter(target, num_bytes)
    try:
        with writer.explained():
            yield writer
        writer.commit()
    finally:
        writer.discard()


def is_abandoned(path: Path) -> bool:
    """Return whether a folder is half-written and no longer being written by any process."""
    if not path.name.startswith(WRITING) or path.absolute() in _BEING_WRITTEN:
        return False
    try:
        lock = lock_folder(path)
    except OSError:  # no folder, or not this user's
        return False
    if lock is not None:
        unlock_folder(lock)
    return lock is not None


def verify_folder(folder: Path, below: str = "") -> dict[str, FileEntry]:
    """Check every file against the manifest, and return the manifest's entries.

    Args:
        folder: a complete folder.
        below: beginning of the names to check, such as `policy/`; "" checks all.

    Raises: CheckpointError naming the first file that differs.
    """
    entries = read_manifest(folder)
    entries = {name: entry for name, entry in entries.items() if name.startswith(below)}
    for name, entry in entries.items():
        path = folder / name
        try:
            size = path.stat().st_size
            # The size first: gigabytes take minutes to digest, and a file that was cut short is
            # found without.
            found = digest_file(path) if size == entry.num_bytes else ""
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; the checkpoint is damaged."
            ) from error
        if size != entry.num_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, expected {entry.num_bytes}; the checkpoint is damaged."
            )
        if found != entry.blake2b:
            raise CheckpointError(
                f"{path} is not what was written (its digest differs); the checkpoint is damaged."
            )
    return entries


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a complete folder by name.

    Raises: CheckpointError if it was not completed or cannot be read.
    """
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise CheckpointError(
                f"{path} is not a file; the checkpoint is damaged, take an older one."
            )
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FileEntry])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}; expected a completely written folder. "
            "It is half-written, or not a checkpoint: take an older one."
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not text
        raise CheckpointError(
            f"{path} cannot be read: {error}; the checkpoint is damaged, take an older one."
        ) from error


def _claim(target: Path, temporary: Path, num_bytes: int) -> int:
    """Make the temporary folder and return its lock."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "it exists already; choose another name or remove it")
    beginning = f"{WRITING}{target.name}-"
    for stale in [path for path in target.parent.iterdir() if path.name.startswith(beginning)]:
        if not stale.name.removeprefix(beginning).isdecimal():
            continue  # of a target with a longer name
        if not is_abandoned(stale):
            raise _make_busy_error(stale)
        shutil.rmtree(stale)
    # Before gigabytes are written: a disk that fills up halfway also stops what else writes to it.
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes are needed and {free:,} are free")
    temporary.mkdir()
    lock = lock_folder(temporary)
    if lock is None:
        raise _make_busy_error(temporary)
    return lock


def _make_busy_error(temporary: Path) -> BlockingIOError:
    return BlockingIOError(
        errno.EAGAIN,
        f"another process or thread is writing it ({temporary}); wait for it, or choose another "
        "name",
    )


def _complete(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    manifest = folder / MANIFEST
    manifest.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=1))
    _sync(manifest)
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        _sync(inner)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(DIGEST_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` next to `path`, sync it, and rename it.

    Raises: OSError; no part of the new file stays.
    """
    with replacing(path) as part:
        part.write_bytes(data)


@contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
    """Yield a path to write to; what is there is synced and gets the name `path` at the end.

    Args:
        path: the file to replace, or to make.
        part: the path to write to, in the same folder: with a process id, if several processes may
            write the same file, or with a suffix that a program needs. None: `path` with `.part`.

    Raises: OSError; no part of the new file stays.
    """
    part = part or path.with_name(f"{path.name}.part")
    try:
        yield part
        _sync(part)
        # Synced before the rename: some file systems write the name first, and a power cut would
        # leave an empty file under it.
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
