"""The folder of a run: its configuration, its software versions and all its output.

<root>/<name>-<date>-<time>/
    config.json        the resolved configuration, for `read_config`; the first resume with a
                       changed one adds config-2.json
    about.json         further facts that results depend on
    config.json.sha256 digest of config.json, for `sha256sum -c`; config-2.json has one too
    versions.json      Python, packages, commit, platform, command; the first resume adds
                       versions-2.json
    process.json       machine and process of the run while it is going on, for `vla-rl why`
    owner.json         the process that writes into the folder, while it does; locked
    metrics.jsonl      one line an update; metrics-undone.jsonl holds those of updates that a resume
                       repeated
    trace.json         timeline of the nodes, for Perfetto; a resumed run starts another file
    graph.txt          the graph of an update, as a tree
    report.html        all of it on one page, at the end
    held_out.jsonl     one line a held-out episode, if the run has any; strips/ shows them
    tensorboard/  checkpoints/  videos/
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.reporting.machine import versions
from vla_rl.util.atomic_files import replace_file
from vla_rl.util.ownership import sole_owner
from vla_rl.util.values import (
    FOLDER_NAME,
    excerpt,
    find_part_without_json,
    names_folder,
    shorten_middle,
)

CONFIG_FILE = "config.json"
OWNER_FILE = "owner.json"


class RunDirectoryGone(VlaRlError):
    """The folder of a run was removed during the run."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. The folders exist; the components of the run write the files."""

    path: Path

    @classmethod
    def create(
        cls, root: Path, name: str, config: msgspec.Struct, about: Mapping[str, str] | None = None
    ) -> "RunDirectory":
        """Create a new folder below `root` with the configuration, the versions and `about`.

        Two runs of one name in the same second get different folders, on shared file systems too.

        Raises: ConfigError if the folder cannot be created or written.
        """
        if not names_folder(name):
            raise ConfigError(f"run name is {name!r}, expected {FOLDER_NAME}")
        try:
            run = cls(_new_folder(root, f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"))
            run._begin(config)
            if about is not None:
                replace_file(
                    run.path / "about.json", msgspec.json.format(msgspec.json.encode(about)) + b"\n"
                )
        except OSError as error:
            raise ConfigError(_not_writable(root, error)) from error
        except ValueError as error:  # such as a zero byte in the path
            raise ConfigError(f"the run directory {str(root)!r} cannot be made: {error}") from error
        return run

    @classmethod
    def resume(cls, path: Path) -> "RunDirectory":
        """Open the folder of an earlier run and record the versions that it continues with.

        Raises: ConfigError if `path` is not the folder of a run, cannot be written, or belongs to a
            process that still runs.
        """
        run = cls.existing(path)
        with run.owned():
            try:
                for folder in (run.tensorboard, run.checkpoints, run.videos):
                    folder.mkdir(exist_ok=True)
                run._write_versions()
            except OSError as error:
                raise ConfigError(_not_writable(path, error)) from error
        return run

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Keep every other process from writing into the folder; reading needs no permission.

        The kernel ends this with the block, or with the process. Raises: ConfigError naming the
        process that owns the folder, if one does, or if the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(
                    sole_owner(self.path / OWNER_FILE, f"the run directory {self.path}")
                )
            except OSError as error:
                raise ConfigError(_not_writable(self.path, error)) from error
            yield

    @classmethod
    def existing(cls, path: Path) -> "RunDirectory":
        """Open the folder of an earlier run for reading.

        Raises: ConfigError, with the runs in the same folder, if it is not one.
        """
        # os.path: pathlib raises for a name that is too long, or in a folder that may not be read
        if not os.path.isfile(path / CONFIG_FILE):
            others = _sibling_runs(path)
            found = (
                f"it is a checkpoint of the run {path.parent.parent}; give that folder, and to resume from this "
                f"checkpoint also --resume-from {path.name}"
                if os.path.isfile(path.parent.parent / CONFIG_FILE)
                and path.parent.name == "checkpoints"
                else f"runs in {path.absolute().parent} are: {', '.join(others)}"
                if others
                else f"{path.absolute().parent} holds no runs either; give the folder that the run "
                "has printed, such as runs/srpo_libero-20260101-120000"
            )
            raise ConfigError(
                f"{shorten_middle(path)} has no {CONFIG_FILE}, expected the folder of an earlier run; "
                f"{shorten_middle(found, 600)}"
            )
        return cls(path)

    def record_resume(self, config: msgspec.Struct) -> None:
        """Record the configuration of a resume if it has changed.

        Raises: ConfigError if it cannot be written.
        """
        if self.config.read_bytes() == _as_json(config):
            return
        try:
            name = _numbered("config", self._newest("config") + 1)
            _write_with_digest(self.path / name, _as_json(config))
        except OSError as error:
            raise ConfigError(_not_writable(self.path, error)) from error

    def is_there(self) -> bool:
        """Whether the folder and its configuration file still exist."""
        try:
            (self.path / CONFIG_FILE).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that does not respond now may respond later
            return True
        return True

    def make_again(self, config: msgspec.Struct) -> None:
        """Create the folder again after it was removed, with all that a resume needs.

        Raises: OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._begin(config)

    @property
    def config(self) -> Path:
        """The resolved configuration as JSON; after resumes, that of the last one."""
        return self.path / _numbered("config", self._newest("config"))

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line an update."""
        return self.path / "metrics.jsonl"

    def trace(self, first_update: int = 0) -> Path:
        """Return the path of the nodes' timeline.

        A run that continues from `first_update` has a file of its own.
        """
        return self.path / (
            "trace.json" if first_update == 0 else f"trace-from-{first_update:06d}.json"
        )

    def new_trace(self, first_update: int) -> Path:
        """Return the same, with a number if an earlier attempt from the same update left a file."""
        path, number = self.trace(first_update), 1
        while path.exists():
            number += 1
            path = self.path / f"trace-from-{first_update:06d}-{number}.json"
        return path

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Folder of videos."""
        return self.path / "videos"

    def _newest(self, stem: str) -> int:
        """Return the largest number of `stem.json` (1), `stem-2.json`, ...; 0 if there is none."""
        found = [0]
        for path in self.path.glob(f"{stem}*.json"):
            # a file of another name, such as config-backup.json, is the user's own
            match = re.fullmatch(rf"{stem}(?:-([1-9][0-9]*))?\.json", path.name)
            if match is not None:
                found.append(int(match[1] or 1))
        return max(found)

    def _begin(self, config: msgspec.Struct) -> None:
        for folder in (self.tensorboard, self.checkpoints, self.videos):
            folder.mkdir(exist_ok=True)
        _write_with_digest(self.path / CONFIG_FILE, _as_json(config))
        self._write_versions()

    def _write_versions(self) -> None:
        name = _numbered("versions", self._newest("versions") + 1)
        replace_file(self.path / name, json.dumps(versions(), indent=2).encode() + b"\n")


def _numbered(stem: str, number: int) -> str:
    return f"{stem}.json" if number < 2 else f"{stem}-{number}.json"


def _as_json(config: msgspec.Struct) -> bytes:
    """Return a configuration as text. Raises: ConfigError naming a value that JSON cannot hold."""
    require_plain(config, type(config).__name__)
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def require_plain(value: Any, name: str) -> None:
    """Raise ConfigError, naming the part, for a value that JSON cannot hold."""
    if (found := find_part_without_json(value, name)) is not None:
        part, wrong = found
        raise ConfigError(
            f"{part} is {excerpt(wrong)}, a {type(wrong).__name__}, expected numbers, text in "
            "UTF-8, booleans, None, or lists and dicts of them"
        )


def _sibling_runs(path: Path) -> list[str]:
    try:
        return sorted(run.parent.name for run in path.absolute().parent.glob(f"*/{CONFIG_FILE}"))
    except OSError:
        return []


def require_writable(folder: Path) -> None:
    """Raise ConfigError unless `folder`, or its nearest existing parent, can be written."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # its name is too long, or holds a zero byte
        raise ConfigError(
            f"the run directory {shorten_middle(folder)} cannot be made ({error}); choose another one"
            if isinstance(error, ValueError)
            else _not_writable(folder, error)
        ) from error
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run directory {shorten_middle(folder)} cannot be written ({above} is not a folder that this "
            "user may write to); choose "
            "another one."
        )
    try:
        # Permissions say nothing of a folder that stores no files (`/proc`) or takes no new ones.
        # On Linux this file has no name, so nothing appears in the folder.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        error.filename = above  # not the name that was drawn for the file
        raise ConfigError(_not_writable(folder, error)) from error


def require_digest(path: Path, data: bytes) -> None:
    """Compare `data`, read from `path`, with the digest next to it.

    A file of an older run, without a digest, passes.

    Raises: ConfigError if they differ.
    """
    digest = _digest_path(path)
    if not digest.is_file():
        return
    try:
        fields = digest.read_bytes().split()
    except OSError as error:
        raise ConfigError(f"{digest} cannot be read: {error.strerror}") from error
    if not fields or fields[0] != hashlib.sha256(data).hexdigest().encode():
        raise ConfigError(
            f"{path} is not what was written (its digest differs from {digest.name}): it was "
            "edited, or is damaged; pass changes as options instead of editing it, or remove "
            f"{digest.name} to accept the file as it is."
        )


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _write_with_digest(path: Path, data: bytes) -> None:
    # the digest second: a kill in between leaves a complete file without a digest, which is
    # accepted
    _digest_path(path).unlink(missing_ok=True)
    replace_file(path, data)
    replace_file(_digest_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())


def _new_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _not_writable(root: Path, error: OSError) -> str:
    where = error.filename if error.filename is not None else root
    return (
        f"the run directory {shorten_middle(root)} cannot be written ({shorten_middle(where)}: "
        f"{error.strerror}); expected a "
        "folder with room that this "
        "user may write; choose another one."
    )
