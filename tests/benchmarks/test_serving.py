"""The benchmark of a policy server measures what it says, with small loads."""

import json

import pytest

from benchmarks import serving


def test_its_last_line_has_every_figure_that_its_help_explains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    serving.main(["--quick"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert serving.__doc__ is not None
    assert all(f"    {name} " in serving.__doc__ for name in figures)
    assert figures["replies_lost"] == 0
    assert figures["reloads_mixed"] == 0
    assert figures["idle_connections"] == 200
