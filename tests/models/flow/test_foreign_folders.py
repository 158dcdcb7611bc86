"""What other projects' folders state beside weights is computed alike, or refused by name, as the page for users of
openpi or LeRobot says."""

import json
import re
import runpy
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pi_folders
import pytest
import torch
from pi_folders import BROKEN, change_json, change_step, change_tensors, load_for_robot

from tests.datasets.support.made_datasets import made_episode
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.engines.policy_model import SampledTokens
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.evaluation.suites import LIBERO, require_fitting
from vla_rl.models.flow.loading import FLOW_FILE
from vla_rl.models.flow.pi_folder import load_pi
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.robot_checks import check_units
from vla_rl.models.loading import compute_digest_as_read, load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.steered.bases import freeze_base
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.ppo_libero import PpoLiberoConfig
from vla_rl.run.imitation import Samples
from vla_rl.types import Sampling

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
Change = Callable[[Path], Any]


def add_step(file: str, **step: Any) -> Change:
    """Return a change that puts a step behind those of a processor."""

    def change(folder: Path) -> None:
        held = json.loads((folder / file).read_text())
        change_json(folder / file, steps=[*held["steps"], step])

    return change


def repeat_last(folder: Path) -> None:
    """Write the last step of the preprocessor twice."""
    add_step(PREPROCESSOR, **json.loads((folder / PREPROCESSOR).read_text())["steps"][-1])(folder)


def set_normalizer(**settings: Any) -> Change:
    return lambda folder: change_step(folder, PREPROCESSOR, "normalizer_processor", **settings)


def double_statistics(folder: Path) -> None:
    for file in (pi_folders.NORMALIZER, pi_folders.UNNORMALIZER):
        wide = pi_folders.statistics(16, 0)
        change_tensors(
            folder / file,
            **{
                f"observation.state.{name}": torch.from_numpy(each).float()
                for name, each in wide.items()
            },
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            add_step(PREPROCESSOR, registry_name="image_crop_resize_processor", config={}),
            r"preprocessor\.json has a step 'image_crop_resize_processor', which is not computed here",
        ),
        (
            add_step(POSTPROCESSOR, **{"class": "mine.steps.ToAbsolute", "config": {}}),
            r"postprocessor\.json has a step 'mine\.steps\.ToAbsolute'",
        ),
        (
            add_step(
                POSTPROCESSOR, registry_name="absolute_actions_processor", config={"enabled": True}
            ),
            "absolute_actions_processor: enabled is on, .* expected off",
        ),
        (
            add_step(
                PREPROCESSOR, registry_name="relative_actions_processor", config={"enabled": True}
            ),
            "relative_actions_processor: enabled is on",
        ),
        (repeat_last, "has two steps 'normalizer_processor', expected one"),
        (
            set_normalizer(features={"action": {"type": "ACTION", "shape": [7]}}),
            r"have None for observation\.state, expected the type STATE",
        ),
        (
            set_normalizer(normalize_observation_keys=["observation.images.image"]),
            r"expected observation\.state among them",
        ),
        (double_statistics, r"mean of observation\.state has 16 numbers, expected the 8"),
        (lambda folder: change_json(folder / CONFIG, min_period=0.01), r"min_period is 0\.01"),
        (lambda folder: change_json(folder / CONFIG, n_obs_steps=2), "n_obs_steps is 2"),
        (
            lambda folder: change_json(folder / CONFIG, use_delta_joint_actions_aloha=True),
            "use_delta_joint_actions_aloha is on, which is not read here",
        ),
    ],
)
def test_what_lerobot_would_do_beside_is_refused_by_name(
    change: Change, message: str, tmp_path: Path
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load_pi(folder)


def test_a_field_that_nobody_here_knows_is_named_if_it_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    harmless = {"optimizer_lr": 1e-4, "empty_cameras": 1, "rtc_config": None, "use_touch": False}
    change_json(folder / CONFIG, **harmless)
    load_pi(folder)
    assert caplog.messages == []
    change_json(folder / CONFIG, action_smoothing=0.5)
    load_pi(folder)
    assert "fields that are not known here and not read: action_smoothing = 0.5." in caplog.text


def test_steps_that_are_switched_off_change_nothing(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    off = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    add_step(PREPROCESSOR, registry_name="relative_actions_processor", config=off)(folder)
    add_step(POSTPROCESSOR, registry_name="absolute_actions_processor", config={"enabled": False})(
        folder
    )
    add_step(POSTPROCESSOR, registry_name="device_processor", config={"device": "cpu"})(folder)
    assert load_pi(folder).settings.action_dim == 7


def test_a_folder_of_openpis_trainer_says_what_to_write(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r'its trainer does not write; .*"action_horizon": H'):
        load_policy(str(folder), CheckpointFormat(), "cpu")


def test_a_policy_of_offsets_from_the_state_is_refused_for_libero(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    require_fitting(load_policy(str(folder), CheckpointFormat(), "cpu"), "mine", LIBERO)
    path = folder / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"
    held = json.loads(path.read_text())
    # LIBERO's hand points down, so the state's first angle is about pi, and its offsets about -pi
    held["norm_stats"]["actions"]["mean"][3], held["norm_stats"]["actions"]["std"][3] = -2.97, 0.3
    path.write_text(json.dumps(held))
    policy = load_policy(str(folder), CheckpointFormat(), "cpu")
    with pytest.raises(
        ConfigError, match=r"number 3 of an action from -3\.27 to -2\.67, .*state_offsets 6"
    ):
        require_fitting(policy, "mine", LIBERO)
    require_fitting(
        load_policy(str(folder), CheckpointFormat(state_offsets=6), "cpu"), "mine", LIBERO
    )


def see(policy: Any, states: np.ndarray) -> list[dict[str, Any]]:
    """Return observations that differ in their states alone."""
    seen = policy.example_observation(seed=0)
    del seen["drawn"]
    return [{**seen, "state": state} for state in states]


def act(policy: Any, seen: list[dict[str, Any]]) -> np.ndarray:
    """Decide greedily, as an engine does."""
    batch = policy.prepare(seen)
    with torch.inference_mode():
        sampled = policy.sample(batch, [Sampling(greedy=True)] * len(seen))
    actions: np.ndarray = policy.decode(sampled.chunk.numpy())
    return actions


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_offsets_become_actions_as_openpi_makes_them(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = np.load(Path(__file__).parent / "golden" / "state_offsets_openpi.npz")
    folder = pi_folders.write_openpi(tmp_path / "policy", kind)
    policy: Any = load_policy(str(folder), CheckpointFormat(state_offsets=6), "cpu")
    states, numbers = golden[f"{kind}_in_state"], golden[f"{kind}_in_numbers"][..., :7]
    chunk = torch.from_numpy(numbers).flatten(1)
    monkeypatch.setattr(policy, "choose", lambda *_: SampledTokens(chunk, chunk, {}, chunk))
    actions = act(policy, see(policy, states))
    np.testing.assert_allclose(actions, golden[f"{kind}_out_actions"], atol=2e-6)


def test_offsets_change_the_actions_alone_and_stay_with_the_folder(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    plain: Any = load_policy(str(folder), CheckpointFormat(), "cpu")
    load_policy(str(folder), CheckpointFormat(state_offsets=6), "cpu").save(tmp_path / "saved")
    policy: Any = load_policy(str(tmp_path / "saved"), CheckpointFormat(), "cpu")
    assert "the first 6 as offsets from the state" in policy.describe()
    states = np.random.default_rng(0).uniform(-3, 3, (2, 8)).astype(np.float32)
    seen = see(policy, states)
    moved = act(policy, seen) - act(plain, seen)
    expected = np.pad(states[:, :6], ((0, 0), (0, 1)))[:, None].repeat(moved.shape[1], axis=1)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
    # a plan is in actions too
    plan = act(policy, seen)[0]
    going_on = {**seen[0], "planned_actions": plan, "delay": np.array(len(plan))}
    np.testing.assert_allclose(act(policy, [going_on])[0], plan, atol=1e-5)


def test_offsets_are_refused_where_they_would_be_learnt_from_or_missing(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    with pytest.raises(ConfigError, match="state_offsets is 8, expected at most 7"):
        load_policy(str(folder), CheckpointFormat(state_offsets=8), "cpu")
    policy: Any = load_policy(str(folder), CheckpointFormat(state_offsets=6), "cpu")
    with pytest.raises(ConfigError, match="over which no head is trained"):
        freeze_base(policy)
    with pytest.raises(ConfigError, match=r"not fine-tuned.*--statistics data"):
        Samples([made_episode("one")], policy)


@pytest.mark.parametrize(("kind", "normalization"), [("pi0", "MEAN_STD"), ("pi05", "MIN_MAX")])
def test_data_in_other_units_are_refused(kind: Any, normalization: str, tmp_path: Path) -> None:
    settings = load_pi(pi_folders.write_lerobot(tmp_path / "policy", kind, normalization)).settings
    held = pi_folders.statistics(8, 0)
    own = np.stack([held["min"], held["mean"], held["max"]])
    check_units("state", settings.state, own)
    # one task of several, not another unit
    check_units("state", settings.state, own * 0.5)
    degrees = own.copy()
    degrees[:, 2] = np.linspace(40.0, 60.0, 3)
    with pytest.raises(
        CheckpointError, match=r"number 2 of the state .* data from 4.*--statistics"
    ):
        check_units("state", settings.state, degrees)


@pytest.mark.parametrize("write", [pi_folders.write_lerobot, pi_folders.write_openpi])
def test_a_flow_policy_without_weights_is_not_taken_for_another_family(
    write: Callable[[Path, Any], Path], tmp_path: Path
) -> None:
    folder = write(tmp_path / "policy", "pi0")
    (folder / pi_folders.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"needs its whole weights in model\.safetensors"):
        load_policy(str(folder), CheckpointFormat(), "cpu")


TRAINING_RECIPES: dict[str, Any] = {"ppo_libero": PpoLiberoConfig, "grpo_libero": GrpoLiberoConfig}
PAGE = (Path(__file__).parents[3] / "docs" / "flow_policies.md").read_text(encoding="utf-8")


def read_commands() -> list[list[str]]:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
    lines = [line.partition("  #")[0] for line in blocks.splitlines()]
    return [shlex.split(line)[1:] for line in lines]


def test_every_command_names_a_recipe_and_options_that_exist() -> None:
    commands = read_commands()
    assert [name for name, *_ in commands] == [
        "eval_libero",
        "sft_flow",
        "ppo_libero",
        "grpo_libero",
        "eval_libero",
        "eval_libero",
    ]
    delays = []
    for name, *arguments in commands:
        assert import_module(f"vla_rl.recipes.{name}").main
        if name in TRAINING_RECIPES:
            config: Any = parse_command(
                TrainingLaunch, TRAINING_RECIPES[name], "", arguments
            ).config
            assert config.policy_format.flow_steps == 4
            assert config.temperature == 1.0
        if name == "eval_libero":
            delays.append(parse_command(EvalLaunch, EvalLiberoConfig, "", arguments).config)
    assert [each.real_time.delay for each in delays] == [0, 2, 2]
    assert [each.real_time.continues_plan for each in delays] == [True, True, False]


def test_every_option_of_the_table_is_taken() -> None:
    (table,) = re.findall(r"## Options\n(.*?)\n## ", PAGE, re.DOTALL)
    options = re.findall(r"^\| `(--.*?)` \|", table, re.MULTILINE)
    assert len(options) == 9
    for option in options:
        found = parse_command(EvalLaunch, EvalLiberoConfig, "", ["my_policy", *shlex.split(option)])
        assert found.config.checkpoint == "my_policy"


def test_the_program_loads_describes_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    pi_folders.write_lerobot(tmp_path / "my_policy", "pi0")
    (tmp_path / "program.py").write_text(f"from pathlib import Path\n{program}")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py")
    assert "in 4 steps" in capsys.readouterr().out
    stored = json.loads((tmp_path / "saved" / FLOW_FILE).read_text())
    assert stored["sampling"]["noise_level"] == 0.3


def test_the_words_of_every_refusal_are_those_of_the_page(tmp_path: Path) -> None:
    (table,) = re.findall(r"## Refused by name\n(.*?)\n`vla_rl", PAGE, re.DOTALL)
    words = [row.split("|")[2].strip() for row in table.splitlines() if row.startswith("| ")][1:]
    listed = {word for row in words for word in row.split(", ")}
    unseen = set(listed)
    for number, (change, _) in enumerate(BROKEN.values()):
        folder = pi_folders.write_lerobot(tmp_path / str(number), "pi05")
        change(folder)
        with pytest.raises(CheckpointError) as caught:
            load_for_robot(folder)
        said = {word for word in listed if word in str(caught.value)}
        assert said, caught.value
        unseen -= said
    # tests of their own: test_pi_folders, test_families
    assert unseen == {"is not named", "no policy is known by its tensors"}


@pytest.mark.parametrize(
    ("kind", "format", "expected"),
    [
        ("pi05", {}, "pi05"),
        ("pi05", {"state_in_prompt": False}, "pi0"),
        ("pi0", {}, "pi0"),
    ],
)
def test_the_state_stands_in_the_prompt_unless_it_is_said_otherwise(
    kind: Any, format: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", kind)
    policy = load_policy(str(folder), CheckpointFormat(**format), "cpu")
    assert isinstance(policy, FlowPolicy)
    policy.save(tmp_path / "saved")
    for each in (policy, FlowPolicy.load(tmp_path / "saved")):
        processor: Any = each._processor
        assert processor.prompt == expected


def test_pi0_does_not_read_its_state_in_the_prompt(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    with pytest.raises(ConfigError, match="the policy is pi0, which has a token for the state"):
        load_policy(str(folder), CheckpointFormat(state_in_prompt=True), "cpu")


def test_new_options_leave_fingerprints_of_earlier_runs_as_they_were(tmp_path: Path) -> None:
    folder = str(pi_folders.write_openpi(tmp_path / "policy", "pi0"))
    first, second = (
        compute_digest_as_read(folder, CheckpointFormat(flow_steps=steps)) for steps in (None, 4)
    )
    assert first != second
