"""Configs import in an instant: what a command line needs for `--help` brings no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "from vla_rl.engines import EngineConfig; from vla_rl.learner import LearnerConfig",
        "from vla_rl.models.openvla_oft import OpenVlaOftConfig, tiny; tiny()",
    ],
)
def test_configs_bring_no_torch(statement: str) -> None:
    code = (
        f"import sys; {statement}; print([name for name in ('torch', 'timm', 'transformers') if "
        "name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import vla_rl.engines
    import vla_rl.models.openvla_oft

    for module in (vla_rl.engines, vla_rl.models.openvla_oft):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


def test_everything_in_the_shop_window_is_there() -> None:
    import vla_rl.engines
    import vla_rl.models.openvla_oft

    for module in (vla_rl.engines, vla_rl.models.openvla_oft):
        assert all(getattr(module, name) is not None for name in module.__all__)
