"""Fine-tuning of flow policies: a new one learns the reaching task from images, folders keep their layout."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_smolvla
import torch
from pi_folders import change_json, write_lerobot
from safetensors.torch import load_file

from vla_rl.cli.command_line import Command, Launch
from vla_rl.datasets import DatasetOptions, LeRobotWriter, RecordedEpisode
from vla_rl.envs.toy import ToyReachEnv
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.recipes.new_flow_policy import NewPolicyConfig
from vla_rl.recipes.sft_flow import PREFIX, SftFlowConfig, main
from vla_rl.run.shifted_images import shift_image
from vla_rl.run.trial import TrialConfig

TOY: dict[str, int | float | str] = {"action_dim": 2, "step_limit": 12}
SMALL = NewPolicyConfig(horizon=4, depth=2, width=64, expert_width=48, patch_size=8)
FEW = ImitationConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2), micro_batch=4)
NO_TRIAL = TrialConfig(episodes=0)


def reach(start: int, colour: int) -> RecordedEpisode:
    """One episode of the reaching task, solved by the optimal action."""
    env = ToyReachEnv(task_id=colour, action_dim=2)
    observation, info = env.reset(options={"init_state_id": start})
    seen, actions = [], []
    while not info["is_success"]:
        seen.append(observation)
        actions.append(env.optimal_action())
        observation, _, _, _, info = env.step(actions[-1])
    images = np.stack([each["image"] for each in seen])
    return RecordedEpisode(
        name=f"{colour} from {start}",
        instruction=seen[0]["instruction"],
        actions=np.stack(actions).astype(np.float32),
        vectors={"state": np.stack([each["state"] for each in seen]).astype(np.float32)},
        frames={"image": images.__getitem__},
        is_success=True,
    )


def arm(number: int, width: int = 7) -> RecordedEpisode:
    """Six steps of an arm with two cameras, whose numbers are drawn."""
    random = np.random.default_rng(number)
    images = random.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    return RecordedEpisode(
        name=f"arm {number}",
        instruction="pick up the bowl",
        actions=random.uniform(-1, 1, (6, width)).astype(np.float32),
        vectors={"state": random.normal(3.0, 2.0, (6, 8)).astype(np.float32)},
        frames={"image": images.__getitem__, "wrist_image": images[::-1].__getitem__},
    )


@pytest.fixture(scope="module")
def arm_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "arm"
    writer = LeRobotWriter(folder, fps=10)
    for number in range(3):
        writer.add_episode(arm(number))
    return folder


async def fine_tune(demonstrations: Path, out: Path, **options: Any) -> int:
    given = {
        "data": DatasetOptions(gripper="none"),
        "imitation": FEW,
        "trial": NO_TRIAL,
        "updates": 2,
        "batch": 4,
        **options,
    }
    config = SftFlowConfig(demonstrations=str(demonstrations), out=str(out), **given)
    return await main(Command(Launch(), config))


def load(folder: Path) -> FlowPolicy:
    policy = load_policy(str(folder), CheckpointConfig(), "cpu")
    assert isinstance(policy, FlowPolicy)
    return policy


@pytest.mark.timeout(600)
async def test_a_new_policy_learns_the_reaching_task_from_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = LeRobotWriter(tmp_path / "reach", fps=10)
    for start in range(30):
        writer.add_episode(reach(start, colour=0))
    learner = ImitationConfig(
        optimizer=OptimizerConfig(lr=2e-3, warmup_steps=10, decay_steps=150), micro_batch=32
    )
    trial = TrialConfig(episodes=20, env_id="vla_rl/toy_reach-v0", env_kwargs={**TOY, "task_id": 0})
    status = await fine_tune(
        tmp_path / "reach",
        tmp_path / "base",
        imitation=learner,
        trial=trial,
        new=SMALL,
        updates=150,
        batch=32,
    )
    assert status == 0
    said = capsys.readouterr().out
    solved = int(said.split("the policy solves ")[1].split(" of 20")[0])
    # a policy that moves at random, or straight ahead, ends in the right one of four squares by chance:
    # ten or more of twenty then happen once in seventy times
    assert solved >= 10
    assert "of the demonstrations 30 of 30 do (100%)" in said
    config = load(tmp_path / "base").config
    assert (config.cameras, config.state_size, config.action_dim) == (("image",), 2, 2)


async def test_statistics_of_a_new_policy_are_those_of_the_data(
    arm_data: Path, tmp_path: Path
) -> None:
    await fine_tune(arm_data, tmp_path / "base", new=SMALL)
    held = json.loads((tmp_path / "base/config.json").read_text())["policy"]
    states = np.concatenate([arm(number).vectors["state"] for number in range(3)])
    assert np.allclose(held["state"]["mean"], states.mean(0), atol=1e-5)
    actions = np.concatenate([arm(number).actions for number in range(3)])
    assert np.allclose(held["actions"]["high"], np.quantile(actions, 0.99, axis=0), atol=1e-5)


async def test_a_smolvla_is_fine_tuned_for_other_data_and_keeps_its_layout(
    arm_data: Path, tmp_path: Path
) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    await fine_tune(
        arm_data,
        tmp_path / "out",
        checkpoint=str(folder),
        statistics="data",
        train="expert",
        draws=2,
    )
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {name: tensor.shape for name, tensor in before.items()} == {
        name: tensor.shape for name, tensor in after.items()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(".vlm." in name for name in changed)
    assert any("lm_expert" in name for name in changed)
    states = np.concatenate([arm(number).vectors["state"] for number in range(3)])
    (file,) = (tmp_path / "out").glob("*_normalizer_processor.safetensors")
    assert np.allclose(load_file(file)["observation.state.mean"], states.mean(0), atol=1e-5)


async def test_adapters_are_merged_into_the_saved_weights(
    arm_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_lerobot(tmp_path / "policy", "pi0")
    await fine_tune(
        arm_data, tmp_path / "out", checkpoint=str(folder), statistics="data", lora_rank=2
    )
    number, whole = capsys.readouterr().out.split(" parameters are trained")[0].split()[-3::2]
    assert int(number) < int(whole) / 2
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.endswith("self_attn.q_proj.weight") for name in changed)
    assert not any("layernorm" in name for name in changed)


async def test_the_same_seed_gives_the_same_weights(arm_data: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        await fine_tune(arm_data, tmp_path / name, new=SMALL, shift=2)
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_what_does_not_fit_is_refused_before_anything_is_trained(
    arm_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="statistics is 'data'"):
        await fine_tune(arm_data, tmp_path / "out", statistics="data")
    with pytest.raises(ConfigError, match=r"trial\.env_id is 'nowhere-v0'"):
        await fine_tune(arm_data, tmp_path / "out", trial=TrialConfig(env_id="nowhere-v0"))
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    (folder / "policy_preprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json is missing"):
        await fine_tune(arm_data, tmp_path / "out", checkpoint=str(folder))
    shipped = str(Path(__file__).parents[2] / "vla_rl/assets/driving_base")
    with pytest.raises(ConfigError, match="expected a flow policy"):
        await fine_tune(arm_data, tmp_path / "out", checkpoint=shipped)
    assert not (tmp_path / "out").exists()


async def test_a_gripper_of_the_other_sign_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    episodes = []
    for number in range(3):
        drawn = arm(number)
        # mostly open, as in demonstrations
        drawn.actions[:, -1] = [-1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
        episodes.append(drawn)
    turned = [msgspec.structs.replace(each, actions=each.actions.copy()) for each in episodes]
    for each in turned:
        each.actions[:, -1] *= -1.0
    for name, data in (("data", episodes), ("turned", turned)):
        writer = LeRobotWriter(tmp_path / name, fps=10)
        for each in data:
            writer.add_episode(each)
    folder = write_lerobot(tmp_path / "policy", "pi0")
    signed = {"data": DatasetOptions(gripper="signed")}
    made = {"checkpoint": str(folder), "statistics": "data", **signed}
    await fine_tune(tmp_path / "data", tmp_path / "first", **made)
    again = {"checkpoint": str(tmp_path / "first"), **signed}
    await fine_tune(tmp_path / "data", tmp_path / "second", **again)
    with pytest.raises(CheckpointError, match="its sign is the opposite one"):
        await fine_tune(tmp_path / "turned", tmp_path / "third", **again)
    assert not (tmp_path / "third").exists()


async def test_a_policy_of_another_robot_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    writer = LeRobotWriter(tmp_path / "data", fps=10)
    writer.add_episode(arm(0, width=6))
    folder = write_lerobot(tmp_path / "policy", "pi0")
    with pytest.raises(CheckpointError, match="has 7 numbers, expected the robot's 6"):
        await fine_tune(tmp_path / "data", tmp_path / "out", checkpoint=str(folder))


async def test_data_that_a_folder_cannot_take_are_refused(
    arm_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await fine_tune(arm_data, tmp_path / "small", new=SMALL)
    own = {"checkpoint": str(tmp_path / "small"), "statistics": "data"}
    with pytest.raises(ConfigError, match=r"statistics is 'data', but .*small is neither openpi's"):
        await fine_tune(arm_data, tmp_path / "out", **own)
    frames = np.zeros((6, 64, 64, 3), np.uint8)
    large = dict.fromkeys(("image", "wrist_image"), frames.__getitem__)
    LeRobotWriter(tmp_path / "large", fps=10).add_episode(
        msgspec.structs.replace(arm(0), frames=large)
    )
    with pytest.raises(DataError, match=r"images 'image' of \[64, 64, 3\], expected \[32, 32, 3\]"):
        await fine_tune(tmp_path / "large", tmp_path / "out", checkpoint=own["checkpoint"])
    pi05 = write_lerobot(tmp_path / "policy", "pi05")
    change_json(pi05 / "config.json", type="pi0")
    for name, episode, words in (
        ("wide", arm(0, width=40), "the action of the demonstrations has 40 numbers, .* most 32"),
        ("blind", msgspec.structs.replace(arm(0), vectors={}), "no state"),
        (
            "still",
            msgspec.structs.replace(arm(0), actions=np.zeros((6, 7), np.float32)),
            r"demonstrations' statistics: policy_p.*json: the action's q01 and q99 are at their initial",
        ),
    ):
        LeRobotWriter(tmp_path / name, fps=10).add_episode(episode)
        given = {"checkpoint": str(pi05), "statistics": "data"}
        with pytest.raises((CheckpointError, DataError), match=words) as caught:
            await fine_tune(tmp_path / name, tmp_path / "out", **given)
        assert PREFIX not in str(caught.value)
    assert not (tmp_path / "out").exists()
    # that the tensors win is said once, of the folder that was named and not of a copy
    (said,) = [message for message in caplog.messages if "says pi0" in message]
    assert str(pi05) in said


def test_a_shifted_image_keeps_its_size_and_repeats_its_edge() -> None:
    image = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    moved = shift_image(image, 1, -2)
    assert np.array_equal(moved[1:, :2], image[:3, 2:])
    assert np.array_equal(moved[0, :2], image[0, 2:])
    assert np.array_equal(moved[:, 3], moved[:, 2])
    assert np.array_equal(shift_image(image, 0, 0), image)


def test_options_of_the_other_start_are_reported() -> None:
    found = SftFlowConfig(checkpoint="policy").unused_options()
    assert "new" in found
    assert "new" not in SftFlowConfig().unused_options()
    assert msgspec.json.decode(msgspec.json.encode(SftFlowConfig()))["draws"] == 4
