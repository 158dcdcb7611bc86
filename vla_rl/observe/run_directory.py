"""One folder for one run: what was asked for, with which software, and everything the run leaves behind.

<root>/<name>-<date>-<time>/
    config.json        the resolved configuration, for `read_config`; config-2.json is that of the first resume with another
    versions.json      Python, packages, commit, platform, command; versions-2.json is that of the first resume
    metrics.jsonl      one line an update
    trace.json         timeline of the nodes, for Perfetto
    graph.txt          the graph of an update, as a tree
    report.html        all of it on one page, at the end
    held_out.jsonl     one line a held-out episode, where they are played; strips/ shows them
    tensorboard/  checkpoints/  videos/
"""

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.observe.versions import versions

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. The folders exist; the files are written by whoever owns them."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, config: msgspec.Struct) -> "RunDirectory":
        """Make a new folder below `root` and write the configuration and the versions into it.

        Two runs of one name in the same second get different folders, on shared file systems too.

        Raises: ConfigError, before anything else has started, where the folder cannot be made or written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ConfigError(f"run name is {name!r}, expected letters, digits, '.', '_' and '-', as it names a folder")
        try:
            run = cls(_new_folder(root, f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"))
            for folder in (run.tensorboard, run.checkpoints, run.videos):
                folder.mkdir()
            (run.path / CONFIG_FILE).write_bytes(_as_json(config))
            run._write_versions()
        except OSError as error:
            raise ConfigError(_not_writable(root, error)) from error
        return run

    @classmethod
    def resume(cls, path: Path) -> "RunDirectory":
        """Open the folder of an earlier run and note the versions that it goes on with.

        Raises: ConfigError where `path` is not the folder of a run, or cannot be written.
        """
        if not (path / CONFIG_FILE).is_file():
            others = sorted(folder.parent.name for folder in path.parent.glob(f"*/{CONFIG_FILE}"))
            found = f"runs in {path.parent} are: {', '.join(others)}" if others else f"{path.parent} holds no run"
            raise ConfigError(f"{path} has no {CONFIG_FILE}, expected the folder of an earlier run; {found}.")
        run = cls(path)
        try:
            for folder in (run.tensorboard, run.checkpoints, run.videos):
                folder.mkdir(exist_ok=True)
            run._write_versions()
        except OSError as error:
            raise ConfigError(_not_writable(path, error)) from error
        return run

    def go_on_with(self, config: msgspec.Struct) -> None:
        """Note the configuration of a resume, where it is not the one before. Raises: ConfigError where it cannot."""
        if self.config.read_bytes() == _as_json(config):
            return
        try:
            (self.path / f"config-{self._num_configs + 1}.json").write_bytes(_as_json(config))
        except OSError as error:
            raise ConfigError(_not_writable(self.path, error)) from error

    @property
    def config(self) -> Path:
        """The resolved configuration as JSON, that of the last resume."""
        return self.path / (CONFIG_FILE if self._num_configs < 2 else f"config-{self._num_configs}.json")

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line an update."""
        return self.path / "metrics.jsonl"

    def trace(self, first_update: int = 0) -> Path:
        """Timeline of the nodes; a run that goes on from `first_update` begins a file of its own."""
        return self.path / ("trace.json" if first_update == 0 else f"trace-from-{first_update:06d}.json")

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

    @property
    def _num_configs(self) -> int:
        return len(list(self.path.glob("config*.json")))

    def _write_versions(self) -> None:
        earlier = len(list(self.path.glob("versions*.json")))
        name = "versions.json" if earlier == 0 else f"versions-{earlier + 1}.json"
        (self.path / name).write_text(json.dumps(versions(), indent=2) + "\n")


def _as_json(config: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


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
        f"the run directory {root} cannot be written ({where}: {error.strerror}); expected a folder with room that this "
        "user may write; choose another one."
    )
