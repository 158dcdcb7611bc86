"""`--engine vllm` on recipes: another engine, the same training."""

import json
from pathlib import Path

import pytest
from _pytest.capture import CaptureFixture

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import EngineConfig
from vla_rl.engines.vllm import VllmConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig, new_policy, training_starts
from vla_rl.run.train import train

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


@pytest.mark.parametrize(
    "arguments", [["--engine", "vllm"], ["--engine=vllm"], ["--engine.kind", "vllm"]]
)
def test_the_engine_is_chosen_by_one_word(arguments: list[str]) -> None:
    command = parse_command(
        TrainingLaunch, SrpoToyConfig, "", [*arguments, "--engine.vllm.num-engines", "2"]
    )
    assert command.config.engine == EngineConfig(kind="vllm", vllm=VllmConfig(num_engines=2))


def test_an_unknown_engine_is_refused_with_those_there_are(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(TrainingLaunch, SrpoToyConfig, "", ["--engine", "vlm"])
    assert "torch" in capsys.readouterr().err


@pytest.mark.needs_vllm
async def test_a_recipe_trains_with_engine_processes(tmp_path: Path) -> None:
    arguments = [
        "--engine",
        "vllm",
        "--run.updates",
        "3",
        "--run.root",
        str(tmp_path),
        "--simulators.num-envs",
        "2",
    ]
    arguments += ["--group-size", "4", "--scheduler.groups-per-update", "1"]
    config = parse_command(TrainingLaunch, SrpoToyConfig, "", arguments).config
    outcome = await train(config, training_starts(config), new_policy(config))
    assert not outcome.was_stopped
    rows = [
        json.loads(line) for line in (outcome.run.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    # the engine's log-probs are the learner's, as far as the same weights chose the tokens
    gaps = [row["update/log_prob_gap_max"] for row in rows if "update/log_prob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-4
    assert all(0.0 < row["engine/update_pause_s"] < row["engine/update_total_s"] for row in rows)
    assert rows[-1]["engine/num_ready"] == 1.0
