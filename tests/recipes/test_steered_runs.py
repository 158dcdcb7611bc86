"""A head is trained, resumed, evaluated and served as any policy, and its folders hold the head alone."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import serving
from websockets.sync.client import connect

from vla_rl.cli import evaluate as evaluation
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.datasets import open_dataset
from vla_rl.errors import CheckpointError
from vla_rl.models.flow.small import SmallFlowConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.shipped import PLACEHOLDER_BASE_POLICY
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.recipes import train_toy
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.serving.openpi_messages import decode_message, encode_message

CPU = torch.device("cpu")


def put_head_over(base: Path, folder: Path, config: SteeringConfig) -> SteeredPolicy:
    policy = SteeredPolicy.create(load_base(str(base), AS_STORED, CPU), config, seed=0)
    policy.save(folder)
    return policy


@pytest.fixture(scope="module")
def toy_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow policy of the reaching task with random weights."""
    folder = tmp_path_factory.mktemp("toy") / "base"
    config = SmallFlowConfig(actions=unit_bounds(2), depth=1, width=16, expert_width=16)
    create_small_flow(config, seed=0).save(folder)
    return folder


def train(tmp_path: Path, *options: str) -> Path:
    """Train on the reaching task as the command line does; return the run's folder."""
    command = parse_command(TrainingLaunch, TrainToyConfig, "", list(options))
    assert asyncio.run(train_toy.main(command)) == 0
    (run,) = (tmp_path / "runs").iterdir()
    return run


@pytest.mark.parametrize("kind", ["residual", "noise"])
def test_a_head_is_trained_and_resumed_and_its_base_is_in_no_checkpoint(
    kind: str, toy_base: Path, tmp_path: Path
) -> None:
    config = SteeringConfig(kind=kind, hidden=(16,))  # type: ignore[arg-type]
    before = put_head_over(toy_base, tmp_path / "head", config)
    short = (
        *("--run.root", str(tmp_path / "runs"), "--run.updates", "1", "--simulators.num-envs", "1"),
        *("--scheduler.groups-per-update", "2", "--step-limit", "8", "--held-out.starts", "1"),
    )
    run = train(tmp_path, "--config", "reach_ppo", "--policy", str(tmp_path / "head"), *short)
    train(tmp_path, "--resume", str(run), "--run.updates", "2")
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    trained = run / "checkpoints" / "update-000002" / "policy"
    assert (trained / "model.safetensors").stat().st_size < 20_000
    after = load_policy(str(trained), CheckpointConfig(), "cpu")
    assert isinstance(after, SteeredPolicy)
    assert after.config == before.config


def test_a_head_is_served_to_clients(toy_base: Path, tmp_path: Path) -> None:
    config = SteeringConfig(hidden=(16,))
    policy = put_head_over(toy_base, tmp_path / "head", config)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    observation = {"image": image, "instruction": "reach the red square"}
    options = ("--map", "image=image", "--reload-every-s", "0")
    with (
        serving(*options, checkpoint=str(tmp_path / "head")) as (address, _),
        connect(address, compression=None) as client,
    ):
        metadata = decode_message(client.recv())
        assert metadata["policy"] == policy.describe()
        client.send(encode_message(observation))
        chunk = decode_message(client.recv())["actions"]
    # a new head corrects nothing, so that this is the base's greedy chunk of the server's seed
    assert chunk.shape == (4, 2)
    assert np.abs(chunk).max() <= 1.0


@pytest.mark.timeout(400)
def test_a_new_head_is_evaluated_and_recorded_on_libero(tmp_path: Path) -> None:
    put_head_over(PLACEHOLDER_BASE_POLICY, tmp_path / "head", SteeringConfig(proprio_size=8))
    plan = (
        *("--suites", "libero_object", "--tasks", "1", "--init-states", "40", "--step-limit", "8"),
        *("--num-envs", "1", "--assets", "stand-ins", "--physics", "fast", "--quality", "fast"),
        *("--image-size", "64"),
    )
    recorded = {}
    for name, checkpoint in {"head": tmp_path / "head", "base": PLACEHOLDER_BASE_POLICY}.items():
        where = ("--root", str(tmp_path / name), "--record-to", str(tmp_path / f"{name}-data"))
        options = [str(checkpoint), *plan, *where]
        command = parse_command(EvalLaunch, EvalLiberoConfig, "", options)
        assert asyncio.run(evaluation.main(command)) == 0
        (folder,) = (tmp_path / name).glob("eval-*")
        results = json.loads((folder / "results.json").read_text())
        assert [each["num_steps"] for each in results["episodes"]] == [8]
        recorded[name] = open_dataset(tmp_path / f"{name}-data")[0]
    # both are greedy, and a new head corrects nothing
    np.testing.assert_allclose(recorded["head"].actions, recorded["base"].actions, atol=1e-5)


def test_a_dry_run_of_an_evaluation_looks_for_the_base_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_nothing(*_: object) -> None:
        """Opening a simulator takes seconds, and is no matter of this test."""

    monkeypatch.setattr(evaluation, "open_each", open_nothing)
    put_head_over(PLACEHOLDER_BASE_POLICY, tmp_path / "head", SteeringConfig())
    options = [str(tmp_path / "head"), "--assets", "stand-ins", "--dry-run", "--tasks", "1"]
    command = parse_command(EvalLaunch, EvalLiberoConfig, "", options)
    assert asyncio.run(evaluation.main(command)) == 0
    assert "everything that the evaluation would read was found" in capsys.readouterr().out
    options += ["--base-policy", str(tmp_path / "nowhere")]
    missing = parse_command(EvalLaunch, EvalLiberoConfig, "", options)
    with pytest.raises(
        CheckpointError, match=r"base of the head .* cannot be loaded from .*nowhere"
    ):
        asyncio.run(evaluation.main(missing))
