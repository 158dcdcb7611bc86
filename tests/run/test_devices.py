"""The device of a run is the one that was asked for, or it is said why there is no GPU."""

import pytest
import torch

from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import RunConfig
from vla_rl.team.devices import resolve_device, why_no_gpu


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def test_a_run_on_the_cpu_does_not_ask_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(RunConfig(device="cpu")).type == "cpu"
    assert resolve_device(RunConfig(device="auto")).type == "cuda"
    assert why_no_gpu() is None


def test_a_run_on_any_device_says_why_it_takes_the_cpu(
    without_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_device(RunConfig(device="auto")).type == "cpu"
    assert "is a build without CUDA): the policy and the learner compute on the CPU" in (
        capsys.readouterr().out
    )


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(without_gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch sees no GPU \(torch .*\)"):
        resolve_device(RunConfig(device="cuda"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The driver is too old.\nUpdate it."), "The driver is too old"),
        (None, "CUDA lists none"),
    ],
)
def test_the_reason_is_the_first_line_of_the_drivers(
    error: Exception | None, reason: str, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert why_no_gpu() == reason
