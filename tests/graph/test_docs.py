"""docs/graph.md does what it says: its blocks run, one after another, in an empty folder."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```(python|toml)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert [kind for kind, _ in blocks].count("python") == 6
    names: dict[str, object] = {"__name__": "graph_page"}
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / "pipeline.toml").write_text(text)
        else:
            exec(compile(text, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "└── rollout: update -> groups*" in printed
    assert re.search(r"update 2: [\d.]+ (ms|s) = ", printed)
    assert (tmp_path / "live.json").read_text() == (tmp_path / "trace.json").read_text()
