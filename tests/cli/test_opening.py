"""A dry run opens each environment once."""

import pytest

from vla_rl.cli.opening import distinct, open_each
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec


def test_environments_that_are_equal_are_one_whatever_the_order_of_their_arguments() -> None:
    first = EnvSpec(id="a", kwargs={"x": 1, "y": 2})
    same = EnvSpec(id="a", kwargs={"y": 2, "x": 1})
    other = EnvSpec(id="a", kwargs={"x": 2})
    assert distinct([first, other, same]) == [first, other]


async def test_text_tasks_are_opened_without_a_simulator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await open_each([EnvSpec(id="text/arithmetic")], SimulatorConfig(num_envs=8))
    assert capsys.readouterr().out == ""
    wrong = EnvSpec(id="text/arithmetic", kwargs={"num_digts": 2})
    with pytest.raises(ConfigError, match="num_digts"):
        await open_each([wrong], SimulatorConfig(num_envs=8))
