"""The plan that a dry run prints names what the run would use."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from toy_runs import small_run

from vla_rl.cli import plan
from vla_rl.cli.plan import EpisodeFootprint


def test_a_plan_names_the_gpu_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "gpu_memory", lambda: [SimpleNamespace(name="H100")])
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    for device, computes in (("cpu", "(CPU)"), ("auto", "(H100)")):
        on_device = msgspec.structs.replace(
            config, run=msgspec.structs.replace(config.run, device=device)
        )
        plan.print_plan(on_device, footprint, 1, 1)
        assert computes in capsys.readouterr().out
