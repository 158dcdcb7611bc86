"""RECAP on the reaching task: labels, what is saved, what is refused, and that the better part is learnt."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.cli.command_line import Command, Launch
from vla_rl.datasets import DatasetOptions, LeRobotWriter, RecordedEpisode
from vla_rl.engines import DeviceLane
from vla_rl.envs.toy import ToyReachEnv
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.learner.config import RecapValueConfig
from vla_rl.learner.recap_values import fit_values
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.recipes import sft_flow
from vla_rl.recipes.new_flow_policy import NewPolicyConfig
from vla_rl.recipes.recap_flow import RecapFlowConfig, main
from vla_rl.recipes.sft_flow import SftFlowConfig
from vla_rl.run.recap import (
    AdvantageLabelConfig,
    label_episodes,
    labelled_batches,
    seeded_labels,
)
from vla_rl.run.trial import TrialConfig

TOY: dict[str, int | float | str] = {"action_dim": 2, "step_limit": 12, "task_id": 0}
DATA = DatasetOptions(gripper="none")
LABELS = AdvantageLabelConfig(lookahead=4, smoothing_window=4, positive_share=0.4, dropout=0.2)
VALUE = RecapValueConfig(updates=100, width=64)
POSITIVE, NEGATIVE = " Advantage: positive", " Advantage: negative"


def reach(start: int, is_good: bool) -> RecordedEpisode:
    """An episode of the reaching task by the optimal action, or by its opposite, which fails."""
    env = ToyReachEnv(task_id=0, action_dim=2, step_limit=12)
    observation, info = env.reset(options={"init_state_id": start})
    seen, actions, is_over = [], [], False
    while not is_over:
        seen.append(observation)
        actions.append(env.optimal_action() * (1.0 if is_good else -1.0))
        observation, _, terminated, truncated, info = env.step(actions[-1])
        is_over = terminated or truncated
    images = np.stack([each["image"] for each in seen])
    return RecordedEpisode(
        name=f"{'good' if is_good else 'bad'} from {start}",
        instruction=seen[0]["instruction"],
        actions=np.stack(actions).astype(np.float32),
        vectors={"state": np.stack([each["state"] for each in seen]).astype(np.float32)},
        frames={"image": images.__getitem__},
        is_success=bool(info["is_success"]),
    )


def write(folder: Path, episodes: list[RecordedEpisode]) -> Path:
    writer = LeRobotWriter(folder, fps=10)
    for each in episodes:
        writer.add_episode(each)
    return folder


def learner(updates: int) -> ImitationConfig:
    schedule = OptimizerConfig(lr=2e-3, warmup_steps=10, decay_steps=max(updates, 20))
    return ImitationConfig(optimizer=schedule, micro_batch=32)


async def make_base(folder: Path, demonstrations: Path, updates: int) -> Path:
    config = SftFlowConfig(
        demonstrations=str(demonstrations),
        out=str(folder),
        data=DATA,
        imitation=learner(updates),
        trial=TrialConfig(episodes=0),
        new=NewPolicyConfig(horizon=4, depth=2, width=64, expert_width=48, patch_size=8),
        updates=updates,
        batch=32,
    )
    assert await sft_flow.main(Command(Launch(), config)) == 0
    return folder


def recap_config(room: Path, **options: Any) -> RecapFlowConfig:
    given: dict[str, Any] = {
        "checkpoint": str(room / "base"),
        "demonstrations": str(room / "demos"),
        "collected": (str(room / "collected"),),
        "out": str(room / "better"),
        "data": DATA,
        "labels": LABELS,
        "value": VALUE,
        "imitation": learner(2),
        "trial": TrialConfig(episodes=0),
        "updates": 2,
        "batch": 8,
    }
    return RecapFlowConfig(**(given | options))


def load(folder: Path) -> FlowPolicy:
    policy = load_policy(str(folder), CheckpointConfig(), "cpu")
    assert isinstance(policy, FlowPolicy)
    return policy


@pytest.fixture(scope="module")
def episodes() -> tuple[list[RecordedEpisode], list[RecordedEpisode]]:
    """Demonstrations, and collected episodes of which every other one fails."""
    return [reach(start, True) for start in range(3)], [
        reach(start, start % 2 == 0) for start in range(3, 13)
    ]


@pytest.fixture(scope="module")
def room(
    tmp_path_factory: pytest.TempPathFactory,
    episodes: tuple[list[RecordedEpisode], list[RecordedEpisode]],
) -> Path:
    folder = tmp_path_factory.mktemp("recap")
    demonstrations, collected = episodes
    write(folder / "demos", demonstrations)
    write(folder / "collected", collected)
    asyncio.run(make_base(folder / "base", folder / "demos", 2))
    return folder


async def test_the_recipe_labels_trains_and_saves_a_policy_that_asks_for_positive(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = TrialConfig(episodes=2, env_id="vla_rl/toy_reach-v0", env_kwargs=TOY)
    config = recap_config(room, guidance=1.5, trial=trial)
    assert await main(Command(Launch(), config)) == 0
    said = capsys.readouterr().out
    assert "3 demonstrations, 10 collected episodes" in said
    assert "values explain" in said
    assert "of 5 collected successes are positive" in said
    assert "of 5 collected failures are positive" in said
    assert "of 2 episodes" in said
    assert load(room / "better").config.sampling.advantage_guidance == 1.5
    # a next round starts from the policy that asks, and trains it on labels that the data bring
    again = recap_config(room, checkpoint=str(room / "better"), out=str(room / "best"))
    assert await main(Command(Launch(), again)) == 0
    assert load(room / "best").config.sampling.advantage_guidance == 1.0


async def test_successes_are_positive_rather_than_failures_and_demonstrations_always(
    room: Path, episodes: tuple[list[RecordedEpisode], list[RecordedEpisode]]
) -> None:
    demonstrations, collected = episodes
    expert = np.zeros(collected[0].num_steps, np.bool_)
    expert[0] = True
    assert collected[0].is_success is False
    collected = [msgspec.structs.replace(collected[0], intervened=expert), *collected[1:]]
    async with DeviceLane(1) as lane:
        found = await label_episodes(
            load(room / "base"), lane, demonstrations, collected, LABELS, VALUE, 0
        )
    instructions = [each.instructions or () for each in found.episodes]
    assert all(words.endswith(POSITIVE) for each in instructions[:3] for words in each)
    assert instructions[3][0].endswith(POSITIVE), "an expert's step in a failure"
    share = {
        is_success: np.mean(
            [
                words.endswith(POSITIVE)
                for each in found.episodes[4:]
                if each.is_success is is_success
                for words in each.instructions or ()
            ]
        )
        for is_success in (True, False)
    }
    assert share[True] > 0.6 > 0.4 > share[False]
    assert all(
        words in (each.instruction + POSITIVE, each.instruction + NEGATIVE)
        for each in found.episodes
        for words in each.instructions or ()
    )


async def test_an_episode_that_does_not_say_whether_it_succeeded_is_refused(
    room: Path, episodes: tuple[list[RecordedEpisode], list[RecordedEpisode]]
) -> None:
    demonstrations, collected = episodes
    unknown = msgspec.structs.replace(collected[0], is_success=None)
    async with DeviceLane(1) as lane:
        with pytest.raises(DataError, match="does not say whether it succeeded"):
            await label_episodes(
                load(room / "base"), lane, demonstrations, [unknown], LABELS, VALUE, 0
            )


async def test_a_label_that_makes_the_instruction_too_long_is_refused_before_training(
    room: Path, episodes: tuple[list[RecordedEpisode], list[RecordedEpisode]]
) -> None:
    long = msgspec.structs.replace(episodes[0][0], instruction=" ".join(["reach"] * 31))
    async with DeviceLane(1) as lane:
        with pytest.raises(DataError, match=r"with its label.*expected the task in 1 to 32 words"):
            await label_episodes(load(room / "base"), lane, [long], [], LABELS, VALUE, 0)


async def test_a_policy_to_start_from_is_needed(room: Path) -> None:
    config = recap_config(room, checkpoint=None)
    with pytest.raises(ConfigError, match="from is not set, expected the folder of a flow policy"):
        await main(Command(Launch(), config))


class Prepared:
    """A policy whose inputs are the observations themselves."""

    config = None

    def prepare(self, observations: Any) -> Any:
        return list(observations)


def test_a_share_of_the_labels_is_dropped_the_same_for_one_seed() -> None:
    seen = [{"instruction": "reach" + POSITIVE, "number": number} for number in range(1000)]
    policy: Any = Prepared()
    batch = labelled_batches(policy, 0.3, 0, random.Random(0))(seen)
    plain = sum(each["instruction"] == "reach" for each in batch)
    assert 240 < plain < 360
    assert all(each["instruction"] in ("reach", "reach" + POSITIVE) for each in batch)
    seeded = seeded_labels(policy, {"dropout": 0.3, "shift": 0})
    assert seeded(seen, 7) == seeded(seen, 7) != seeded(seen, 8)


def test_values_of_an_episode_come_from_networks_that_have_not_seen_it() -> None:
    # features that name the episode: learnt by heart, they would explain everything
    episodes = torch.arange(40).repeat_interleave(5)
    features = torch.nn.functional.one_hot(episodes, 40).float()
    returns = -torch.rand(40, generator=torch.Generator().manual_seed(0))[episodes]
    config = RecapValueConfig(width=64, updates=600, batch=20, bins=21)
    held_out = fit_values(features, returns, episodes, config, 0)
    by_heart = fit_values(features, returns, episodes, msgspec.structs.replace(config, folds=1), 0)
    assert by_heart.explained > 0.9
    assert held_out.explained < 0.2
    again = fit_values(features, returns, episodes, config, 0)
    assert torch.equal(again.values, held_out.values)


def test_values_follow_what_the_features_say_of_the_return() -> None:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(600, 8, generator=draw)
    returns = -torch.sigmoid(2.0 * features[:, 0])
    found = fit_values(
        features, returns, torch.arange(600) // 10, RecapValueConfig(width=64, updates=200), 0
    )
    assert found.explained > 0.8
    with pytest.raises(ValueError, match="expected finite numbers of at least one control step"):
        fit_values(features * float("nan"), returns, torch.arange(600), RecapValueConfig(), 0)


@pytest.mark.proof
@pytest.mark.timeout(900)
async def test_of_data_that_is_half_bad_the_good_half_is_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Supervised fine-tuning on the same episodes is the control, as in verl-vla's run."""
    demonstrations = [reach(start, True) for start in range(6)]
    collected = [reach(start, start % 2 == 0) for start in range(6, 50)]
    write(tmp_path / "demos", demonstrations)
    write(tmp_path / "collected", collected)
    write(tmp_path / "all", [*demonstrations, *collected])
    await make_base(tmp_path / "base", tmp_path / "demos", 60)
    trial = TrialConfig(episodes=60, env_id="vla_rl/toy_reach-v0", env_kwargs=TOY)
    training: dict[str, Any] = {
        "trial": trial,
        "imitation": learner(400),
        "updates": 400,
        "batch": 32,
    }
    solved = {}
    for name, run, config in (
        ("recap", main, recap_config(tmp_path, **training)),
        (
            "control",
            sft_flow.main,
            SftFlowConfig(
                demonstrations=str(tmp_path / "all"),
                checkpoint=str(tmp_path / "base"),
                out=str(tmp_path / "plain"),
                data=DATA,
                **training,
            ),
        ),
    ):
        capsys.readouterr()
        assert await run(Command(Launch(), config)) == 0
        said = capsys.readouterr().out
        solved[name] = int(said.split("the policy solves ")[1].split(" of 60")[0])
    # measured: 50 and 18 of 60
    assert solved["recap"] >= solved["control"] + 12
