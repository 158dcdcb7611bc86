"""The benchmark of language replies measures what it says, on a small model."""

import json
from pathlib import Path

import pytest

from benchmarks import language
from vla_rl.models.language import TinyConfig
from vla_rl.models.language.tiny import write_tiny

SMALL = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)
SIZES = ("--prompts", "6", "--rows", "2", "--shortest", "2", "--longest", "8", "--no-vllm")


def test_its_last_line_has_every_figure_that_its_help_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path, SMALL, ["Explain the tides."] * 4, seed=0)
    language.main(["--policy", str(tmp_path), *SIZES])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert language.__doc__ is not None
    assert all(f"    {name} " in language.__doc__ for name in figures)
    assert figures.pop("vllm_vs_torch_tokens_per_s") is None
    assert 0.8 <= figures.pop("group_prefill_share") <= 7 / 8
    assert figures.pop("logprob_gap") <= 1e-4
    assert len(figures) == 3
    assert all(value > 0.0 for value in figures.values())


def test_without_the_model_it_says_which_command_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        language.main([*SIZES])
    assert caught.value.code == 1
    assert "run `vla-rl install smollm2`" in capsys.readouterr().err
