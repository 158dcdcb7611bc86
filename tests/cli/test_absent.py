"""Options of other trainers that do not exist here are refused by name."""

import pytest

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.recipes.train_toy import TrainToyConfig


@pytest.mark.parametrize("what", ["pipeline", "context"])
@pytest.mark.parametrize("spelling", ["--learner.{}-parallel", "--learner.{}_parallel=2"])
def test_other_kinds_of_parallelism_are_refused_by_name(what: str, spelling: str) -> None:
    option = f"--learner.{what}-parallel"
    with pytest.raises(ConfigError, match=rf"{option} does not exist: .*{what} parallelism"):
        parse_command(TrainingLaunch, TrainToyConfig, "", [spelling.format(what), "2"])
