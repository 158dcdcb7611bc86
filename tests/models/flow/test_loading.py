"""Folders of flow policies load, act, learn, are saved, refuse what does not fit."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pi_folders
import pytest
import tiny_smolvla
import torch
from pi_folders import set_width
from safetensors.torch import load_file
from small_flow import TINY, observe, tiny_policy

import vla_rl
from vla_rl.cli.command_line import parse_command
from vla_rl.cli.evaluate import EvalLaunch, main
from vla_rl.engines import DeviceLane, EngineConfig, PolicyModel, TorchActionEngine
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.families import find_family
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.loading import FLOW_FILE
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.testing import PolicyContract
from vla_rl.types import Observation, Sampling, with_drawn

QUICK = ["--assets", "stand-ins", "--physics", "fast", "--quality", "fast", "--image-size", "64"]

Write = Callable[[Path], Path]

FOLDERS: dict[str, Write] = {
    "pi0 of openpi": lambda folder: pi_folders.write_openpi(folder, "pi0"),
    "pi05 of openpi": lambda folder: pi_folders.write_openpi(folder, "pi05"),
    "pi0 of LeRobot": lambda folder: pi_folders.write_lerobot(folder, "pi0"),
    "pi05 of LeRobot": lambda folder: pi_folders.write_lerobot(folder, "pi05"),
    "SmolVLA": tiny_smolvla.write_smolvla,
}


def observe_robot(seed: int) -> Observation:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
        "wrist_image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
        "state": rng.normal(size=8).astype(np.float32) * 0.2,
        "instruction": "pick up the bowl" + " and wait" * (seed % 3),
    }


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FOLDERS[request.param](tmp_path / "policy")


def load(folder: Path, **format: Any) -> FlowPolicy:
    policy = vla_rl.load_policy(str(folder), CheckpointFormat(**format), "cpu")
    assert isinstance(policy, FlowPolicy)
    return policy


class FolderContract(PolicyContract):
    greedy_has_noise = True

    @pytest.fixture(scope="class")
    @classmethod
    def policy(cls, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel[Any]:
        return load(cls.write(tmp_path_factory.mktemp("made") / "policy"))

    @staticmethod
    def write(folder: Path) -> Path:
        raise NotImplementedError

    def make_observations(self) -> list[Observation]:
        return [observe_robot(seed) for seed in range(4)]


class TestPi0(FolderContract):
    @staticmethod
    def write(folder: Path) -> Path:
        return pi_folders.write_openpi(folder, "pi0")


class TestPi05(FolderContract):
    @staticmethod
    def write(folder: Path) -> Path:
        return pi_folders.write_lerobot(folder, "pi05")


class TestSmolVla(FolderContract):
    @staticmethod
    def write(folder: Path) -> Path:
        return tiny_smolvla.write_smolvla(folder)


def test_a_saved_folder_has_the_same_bits_and_acts_alike(folder: Path, tmp_path: Path) -> None:
    policy = load(folder).with_sampling(FlowSampling(num_steps=4, noise_level=0.3))
    policy.save(tmp_path / "saved")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "model.safetensors":
            assert (tmp_path / "saved" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    again = FlowPolicy.load(tmp_path / "saved")
    assert again.config == policy.config
    samplings = [Sampling(seed=1), Sampling(seed=2)]
    with torch.inference_mode():
        first, second = (
            each.sample(each.prepare([observe_robot(0), observe_robot(1)]), samplings)
            for each in (policy, again)
        )
    torch.testing.assert_close(first.tokens, second.tokens, rtol=0, atol=1e-5)


def test_options_of_a_folder_are_saved_with_it(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    policy = load(folder, cameras=("wrist_image", "none", "none"), chunk_size=3)
    policy.save(tmp_path / "saved")
    again = FlowPolicy.load(tmp_path / "saved")
    assert again.config.cameras == policy.config.cameras == ("wrist_image",)
    assert again.config.chunk_size == 3
    stored = json.loads((tmp_path / "saved" / FLOW_FILE).read_text())
    assert stored["sampling"]["num_steps"] == 10
    (tmp_path / "saved" / FLOW_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        FlowPolicy.load(tmp_path / "saved")


def test_a_chain_has_as_many_steps_as_the_folder_says(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    pi_folders.change_json(folder / "config.json", num_inference_steps=7)
    assert load(folder).config.sampling.num_steps == 7


def test_an_option_that_the_family_does_not_read_is_refused(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"norm_key is 'libero', but .* those of smolvla"):
        load(folder, norm_key="libero")
    lerobots = pi_folders.write_lerobot(tmp_path / "lerobots", "pi05")
    with pytest.raises(ConfigError, match=r"norm_key is 'libero', but .* is LeRobot's"):
        load(lerobots, norm_key="libero")
    with pytest.raises(ConfigError, match="convention is 'rlinf'"):
        load(folder, convention="rlinf")


def test_half_precision_is_asked_for_by_dtype(folder: Path) -> None:
    policy = load(folder, dtype="bfloat16")
    assert {each.dtype for each in policy.network.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare([observe_robot(0)]), [Sampling(seed=0)])
    assert torch.isfinite(sampled.tokens).all()


async def test_an_engine_answers_episodes_in_one_batch_and_scoring_agrees(folder: Path) -> None:
    policy = load(folder)
    observations = [observe_robot(seed) for seed in (0, 1, 1, 2)]
    async with (
        asyncio.timeout(60),
        DeviceLane(num_threads=1) as lane,
        TorchActionEngine(policy, lane, EngineConfig(max_batch=4)) as engine,
    ):
        chunks = await asyncio.gather(
            *(engine.act(each, Sampling(seed=row)) for row, each in enumerate(observations))
        )
    limit = 2e-6 * math.sqrt(chunks[0].tokens.size / 8)
    for observation, chunk in zip(observations, chunks, strict=True):
        assert chunk.actions.shape == (5, 7)
        seen = [with_drawn(observation, chunk.drawn)]
        with torch.inference_mode():
            found, _ = policy.log_probs(
                policy.prepare(seen), torch.from_numpy(chunk.tokens)[None], torch.ones(1)
            )
        assert abs(float(found.sum()) - float(chunk.log_probs.sum())) <= max(limit, 1e-5)


def test_equal_observations_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(folder)
    read: list[int] = []
    network: Any = policy.network
    embed = type(network).embed_prefix

    def count(self: Any, inputs: Any) -> Any:
        read.append(len(inputs.images))
        return embed(self, inputs)

    monkeypatch.setattr(type(network), "embed_prefix", count)
    samplings = [Sampling(seed=seed) for seed in range(6)]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare([observe_robot(0)] * 6), samplings)
    assert read == [1]
    assert len({row.numpy().tobytes() for row in sampled.tokens}) == 6


@pytest.mark.timeout(300)
def test_a_folder_of_lerobot_runs_an_episode_of_libero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    plan = [
        "--suites",
        "libero_object",
        "--tasks",
        "1",
        "--init-states",
        "40",
        "--step-limit",
        "10",
    ]
    plan += ["--num-envs", "1", "--root", str(tmp_path), *QUICK]
    launch = parse_command(EvalLaunch, EvalLiberoConfig, "", [str(folder), *plan])
    assert asyncio.run(main(launch)) == 0
    (results,) = tmp_path.glob("eval-*/results.json")
    (episode,) = json.loads(results.read_text())["episodes"]
    assert episode["num_steps"] == 10
    assert "decides 5 x 7 numbers in 10 steps" in capsys.readouterr().out


def test_a_folder_of_another_robot_is_refused_before_an_episode(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    set_width("observation.state", 10)(folder)
    launch = parse_command(EvalLaunch, EvalLiberoConfig, "", [str(folder), *QUICK])
    with pytest.raises(ConfigError, match="state of 10 numbers, and LIBERO's has 8"):
        asyncio.run(main(launch))


def decide(policy: FlowPolicy) -> torch.Tensor:
    with torch.inference_mode():
        return policy.sample(
            policy.prepare([observe(0), observe(2)]), [Sampling(seed=3)] * 2
        ).tokens


def test_a_saved_policy_decides_as_before_and_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    policy = tiny_policy(num_steps=3, noise_level=0.3)
    policy.save(tmp_path / "policy")
    family = find_family(tmp_path / "policy")
    assert family is not None
    assert family.name == "small_flow"
    loaded = load_policy(str(tmp_path / "policy"), CheckpointConfig(), "cpu")
    assert isinstance(loaded, FlowPolicy)
    assert loaded.config == policy.config
    assert torch.equal(decide(loaded), decide(policy))
    loaded.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        first, second = ((tmp_path / each / name).read_bytes() for each in ("policy", "again"))
        assert first == second


def test_a_folder_can_be_loaded_with_another_chain(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "policy")
    sampling = FlowSampling(num_steps=7, noise_level=0.2)
    assert load_small_flow(tmp_path / "policy", sampling).config.sampling == sampling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"num_steps": 0}}, "num_steps"),
        ({"sampling": {"noise_level": -1.0}}, "noise_level"),
        ({"model_type": "pi0"}, "model_type is 'pi0'"),
        ({"policy": {}}, "actions"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    tiny_policy().save(tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    (tmp_path / "policy" / "vla_rl_manifest.json").unlink(missing_ok=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        load_small_flow(tmp_path / "policy")


def test_tensors_of_other_sizes_are_refused() -> None:
    policy = tiny_policy()
    tensors = policy.checkpoint_tensors()
    tensors["action_in.weight"] = torch.zeros(24, 7)
    with pytest.raises(CheckpointError, match=r"action_in\.weight"):
        policy.load_checkpoint_tensors(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, r"\['image'\] is NoneType, expected uint8 \[16, 16, 3\]"),
        ({"image": np.zeros((32, 32, 3), np.uint8)}, r"uint8 \[32, 32, 3\], expected uint8 \[16"),
        ({"image": np.zeros((16, 16, 3), np.float32)}, r"float32 \[16, 16, 3\]"),
        ({"wrist_image": None}, "cameras image, wrist_image at 16 pixels"),
        (
            {"state": np.zeros(3, np.float32)},
            r"\['state'\] is float32 \[3\], expected float32 \[2\]",
        ),
        ({"instruction": " "}, "expected the task in 1 to 32 words"),
        ({"instruction": "word " * 33}, "expected the task in 1 to 32 words"),
    ],
)
def test_observations_that_do_not_fit_are_refused(change: Observation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_policy().prepare([{**observe(0), **change}])


def test_a_camera_that_is_not_optional_may_not_be_missing() -> None:
    seen = observe(0)
    del seen["image"]
    with pytest.raises(ValueError, match=r"\['image'\] is NoneType"):
        tiny_policy().prepare([seen])


def test_actions_are_normalised_by_their_statistics() -> None:
    policy = tiny_policy()
    actions = np.array([[[2.0, -1.0, 0.5]] * 4], np.float32)
    numbers = policy.encode(actions)
    np.testing.assert_allclose(numbers.reshape(4, 3)[0], [1.0, -1.0, 0.5])
    np.testing.assert_allclose(policy.decode(numbers), actions)
    assert TINY.state is not None
    state = policy.prepare([{**observe(0), "state": np.array([2.5, -1.0], np.float32)}]).state
    np.testing.assert_allclose(state.numpy(), [[1.0, -1.0]])


def test_words_whose_order_or_spelling_differs_are_different_tokens() -> None:
    policy = tiny_policy()
    texts = ["put the red mug", "put the mug red", "Put the  red mug", "put the red cup"]
    rows = [
        policy.prepare([{**observe(0), "instruction": text}]).tokens[0].tolist() for text in texts
    ]
    assert rows[0] == rows[2]
    assert rows[0] != rows[1]
    assert rows[0] != rows[3]
