"""Text that is not UTF-8, and JSON that is none, is one error that names the file, wherever the
package reads text.
"""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from vla_rl.cli.command_line import read_config
from vla_rl.cli.report import write_report
from vla_rl.datasets import LeRobotWriter, RecordedEpisode, read_lerobot
from vla_rl.datasets.prompts import read_prompts
from vla_rl.errors import CheckpointError, ConfigError, DataError, GraphError, VlaRlError
from vla_rl.evaluation import read_records
from vla_rl.evaluation.conditions import refuse_other_conditions
from vla_rl.evaluation.validation import read_validation
from vla_rl.graph import Pipeline
from vla_rl.learner.checkpoint.folders import read_header
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.prismatic.public_config import read_extension, read_public_config
from vla_rl.models.prismatic.statistics import read_statistics
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config
from vla_rl.util.atomic_files import read_manifest

NO_TEXT = b'{"name": "\xff\xfe", "id": "\xff"}\n'
NESTED = b"[" * 100_000


class Named(Config, frozen=True):
    name: str = ""


def mlp(folder: Path) -> None:
    shape = MlpConfig(
        state_size=2, action_low=(-1.0,), action_high=(1.0,), num_bins=3, chunk_size=1, hidden=(4,)
    )
    MlpPolicy.create(shape, seed=0).save(folder / "policy")


def dataset(folder: Path) -> None:
    actions = np.zeros((3, 2), np.float32)
    episode = RecordedEpisode(
        name="a", instruction="go", actions=actions, vectors={"state": actions}, frames={}
    )
    LeRobotWriter(folder).add_episode(episode)


def old_dataset(folder: Path) -> None:
    """The lists of version 2.1 are lines of JSON."""
    dataset(folder)
    info = msgspec.json.decode((folder / "meta/info.json").read_bytes())
    (folder / "meta/info.json").write_bytes(
        msgspec.json.encode({**info, "codebase_version": "v2.1"})
    )


def nothing(folder: Path) -> None: ...


def language_model(folder: Path) -> None:
    shutil.copytree(ARITHMETIC_BASE, folder / "base")


@pytest.mark.parametrize("content", [NO_TEXT, NESTED], ids=["not UTF-8", "nested too deep"])
@pytest.mark.parametrize(
    ("name", "error", "prepare", "read"),
    [
        ("config.json", ConfigError, nothing, lambda path: read_config(path, Named)),
        ("config.toml", ConfigError, nothing, lambda path: read_config(path, Named)),
        ("pipeline.toml", GraphError, nothing, Pipeline.from_toml),
        ("manifest.json", CheckpointError, nothing, lambda path: read_manifest(path.parent)),
        ("checkpoint.json", CheckpointError, nothing, lambda path: read_header(path.parent)),
        ("policy/config.json", CheckpointError, mlp, lambda path: MlpPolicy.load(path.parent)),
        (
            "base/config.json",
            CheckpointError,
            language_model,
            lambda path: CausalLanguageModel.load(path.parent),
        ),
        (
            "base/generation_config.json",
            CheckpointError,
            language_model,
            lambda path: CausalLanguageModel.load(path.parent),
        ),
        ("config.json", CheckpointError, nothing, lambda path: read_public_config(path.parent)),
        ("vla_rl.json", CheckpointError, nothing, lambda path: read_extension(path.parent)),
        (
            "dataset_statistics.json",
            CheckpointError,
            nothing,
            lambda path: read_statistics([path.parent], {}),
        ),
        ("meta/info.json", DataError, dataset, lambda path: read_lerobot(path.parents[1])),
        ("meta/tasks.jsonl", DataError, old_dataset, lambda path: read_lerobot(path.parents[1])),
        ("rows.jsonl", DataError, nothing, read_prompts),
        ("held_out.jsonl", ConfigError, nothing, read_records),
        ("validation.jsonl", ConfigError, nothing, read_validation),
        ("episodes.jsonl", ConfigError, nothing, read_records),
        ("conditions.json", ConfigError, nothing, lambda path: refuse_other_conditions(path, {})),
    ],
)
def test_a_file_that_is_not_utf_8_is_one_error_that_names_it(
    name: str,
    error: type[VlaRlError],
    prepare: Callable[[Path], None],
    read: Callable[[Path], Any],
    content: bytes,
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    path = tmp_path / name
    path.write_bytes(content + (b"\n" if path.suffix == ".jsonl" else b""))
    with pytest.raises(error) as caught:
        read(path)
    assert path.name in str(caught.value)
    assert str(path.parent) in str(caught.value)


def test_a_table_with_a_text_that_is_not_utf_8_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    column = pyarrow.array([b"ok", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet is not a parquet file with texts in UTF-8"):
        read_prompts(tmp_path / "rows.parquet")
    dataset(tmp_path / "data")
    tasks = pyarrow.table({"task_index": [0, 1], "task": column})
    pyarrow.parquet.write_table(tasks, tmp_path / "data/meta/tasks.parquet")
    with pytest.raises(
        DataError, match=r"tasks.parquet is not a whole Parquet file with texts in UTF-8"
    ):
        read_lerobot(tmp_path / "data")


def test_a_report_does_without_what_is_damaged_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory.create(tmp_path, "damaged", Config(), {"assets": "stand-ins"})
    (run.path / "graph.txt").write_bytes(b"rollout \xff update")
    run.metrics.write_bytes(b'{"update":1,"wall_time_s":0,"rollout/success_rate":null}\n' + NO_TEXT)
    for name in ("versions.json", "about.json"):
        (run.path / name).write_bytes(NO_TEXT)
    page = write_report(run).read_text()
    assert "1 updates" in page
    assert "rollout � update" in page
    for name in ("graph.txt", "metrics.jsonl", "versions.json", "about.json"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1, name
    held_out = msgspec.json.encode({"weight_version": 0})
    (run.path / "held_out.jsonl").write_bytes(held_out + b"\n")
    with pytest.raises(
        ConfigError, match=r"held_out.jsonl, line 1 is not a result: .*; remove that line"
    ):
        write_report(run)


PACKAGE = Path(__file__).parents[2] / "vla_rl"
OPENS = ("read_text", "write_text", "open", "run", "Popen", "check_output", "fdopen")


def opens_text_without_encoding(node: ast.AST) -> bool:
    """Return whether a call reads or writes text in the encoding of the user's locale."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    given = {keyword.arg for keyword in node.keywords}
    if name not in OPENS or "encoding" in given:
        return False
    if name in ("read_text", "write_text"):
        return not (name == "read_text" and node.args)
    if name in ("run", "Popen", "check_output"):
        return "text" in given or "universal_newlines" in given
    modes = [each.value for each in node.args if isinstance(each, ast.Constant)]
    is_of_text = any(str(mode) in ("r", "w", "a", "x", "r+", "w+", "rt", "wt") for mode in modes)
    return is_of_text or (isinstance(function, ast.Name) and not any("b" in str(m) for m in modes))


def test_every_text_file_is_read_and_written_as_utf_8_whatever_the_locale() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if opens_text_without_encoding(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path.read_text()", True),
        ("open(path)", True),
        ("path.open('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("path.open('wb')", False),
        ("pool.open(spec)", False),
        ("subprocess.run(command)", False),
    ],
)
def test_what_opens_text_is_found(line: str, is_found: bool) -> None:
    (call,) = [each for each in ast.walk(ast.parse(line)) if isinstance(each, ast.Call)]
    assert opens_text_without_encoding(call) is is_found
