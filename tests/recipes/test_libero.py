"""The training recipes of LIBERO: their starts, conditions, learning rate, runs."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disks import SmallDisk
from toy_runs import as_lines, evaluated

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.report import write_report
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    HeldOutEvaluator,
    RecordFile,
    held_out,
    read_records,
    write_contact_sheet,
)
from vla_rl.evaluation.conditions import record_conditions
from vla_rl.evaluation.records import SUCCESSES
from vla_rl.learner import LearnerConfig, latest_checkpoint
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.prismatic.config import OpenVlaConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import srpo_libero
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.ppo_libero import PpoLiberoConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, SrpoLiberoConfig
from vla_rl.recipes.suite_training import held_out_episodes, starting_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.run.train import TrainingRun, train
from vla_rl.types import Config, EpisodeSpec, Trajectory


@pytest.mark.timeout(300)
async def test_srpo_updates_a_policy_from_episodes_of_real_libero(
    tmp_path: Path,
) -> None:
    config = SrpoLiberoConfig(
        run=RunConfig(name="libero", root=str(tmp_path), updates=1),
        tasks=("libero_goal/8",),
        assets="stand-ins",
        step_limit=16,
        image_size=64,
        group_size=2,
        # random weights do not succeed, and an update without signal would stand still
        learner=LearnerConfig(entropy_coef=0.01),
        simulators=SimulatorConfig(num_envs=1),  # each builds the scene for itself
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0),
        held_out=HeldOutConfig(init_states="48-49", step_limit=16, physics="fast"),
    )
    policy = OpenVlaOft.create(tiny(), seed=0)
    evaluator = HeldOutEvaluator(held_out_episodes(config), contact_sheet=write_contact_sheet)
    async with asyncio.timeout(280):
        outcome = await train(config, training_starts(config), policy, evaluator=evaluator)
    (metrics,) = read_metrics(outcome.run.metrics)
    assert outcome.progress.num_episodes == 2
    assert outcome.progress.env_steps == 32
    assert metrics["update/decisions"] == 4
    assert metrics["update/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    checkpoint = latest_checkpoint(outcome.run.checkpoints)
    assert checkpoint is not None
    assert OpenVlaOft.load(checkpoint / "policy").config.chunk_size == 8
    assert len(list(outcome.run.videos.glob("*failure*.mp4"))) == 1
    records = read_records(outcome.run.path / SUCCESSES.file)
    assert sorted((record.weights, record.start) for record in records) == [
        (0, 48), (0, 49), (1, 48), (1, 49),
    ]  # fmt: skip
    assert len(list((outcome.run.path / "strips").glob("*.jpg"))) == 4
    page = write_report(outcome.run).read_text()
    assert "0 of 2: 0 % (95 %: 0 to 66)" in page
    assert page.count("<svg") == 4  # success, return, what failures earned, time


async def test_a_result_that_was_cut_off_by_a_kill_is_overwritten_by_the_next_one(
    tmp_path: Path,
) -> None:
    run = RunDirectory.create(tmp_path, "evaluated", Config())
    path, whole = run.path / SUCCESSES.file, as_lines([evaluated(start=40)])
    path.write_bytes(whole + whole[:30])
    await HeldOutEvaluator([])(run, SimpleNamespace(num_envs=1), SimpleNamespace(weight_version=1))  # type: ignore[arg-type]
    assert len(read_records(path)) == 1
    await RecordFile(path).append_record(evaluated(start=40))
    assert path.read_bytes() == whole + whole


def test_a_run_is_not_evaluated_with_other_assets_than_it_was(tmp_path: Path) -> None:
    config = SrpoLiberoConfig(tasks=("libero_goal/7",), held_out=HeldOutConfig(init_states="48-49"))
    run, episodes = RunDirectory.create(tmp_path, "run", config), held_out_episodes(config)
    record_conditions(
        held_out.conditions_path(run), HeldOutEvaluator(episodes, assets="stand-ins").conditions
    )
    HeldOutEvaluator(episodes, assets="stand-ins").check_records(run)
    with pytest.raises(ConfigError, match=r"assets is 'LIBERO' now, but .* says 'stand-ins'"):
        HeldOutEvaluator(episodes, assets="LIBERO").check_records(run)


async def evaluate_again(run: RunDirectory, **changed: Any) -> None:
    """Evaluate weights whose episodes have all run."""
    config = SrpoLiberoConfig(
        tasks=("libero_goal/7",),
        held_out=HeldOutConfig(**{"init_states": "48-49", "step_limit": 16, **changed}),
    )
    evaluator = HeldOutEvaluator(held_out_episodes(config))
    evaluator.check_records(run)
    with (run.path / SUCCESSES.file).open("ab") as file:
        file.write(as_lines(evaluated(start=state, weights=1) for state in (48, 49)))
    await evaluator(run, SimpleNamespace(num_envs=1), SimpleNamespace(weight_version=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_limit": 300}, r"step_limit is 300 now, but .*held_out_conditions\.json says 16"),
        ({"physics": "fast"}, r"physics is 'fast' now, but .* says 'exact'"),
    ],
)
async def test_held_out_results_of_other_conditions_are_never_put_together(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path, "evaluated", Config())
    await evaluate_again(run)
    await evaluate_again(run)
    with pytest.raises(ConfigError, match=message):
        await evaluate_again(run, **changed)


async def test_a_contact_sheet_that_cannot_be_written_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full_disk(run: RunDirectory, weight_version: int, trajectory: Trajectory) -> None:
        raise OSError("no space left")

    async def run_missing(
        pool: Any, engine: Any, agent: Any, missing: Sequence[EpisodeSpec], done: Any
    ) -> None:
        for episode in missing:
            await done(
                SimpleNamespace(
                    episode=episode, final_observation={"instruction": "turn on the stove"}, is_success=True,
                    info={**episode.options, "scene_seed": 0}, num_env_steps=7,
                )
            )  # fmt: skip

    monkeypatch.setattr(held_out, "run_each", run_missing)
    run = RunDirectory.create(tmp_path, "evaluated", Config())
    config = SrpoLiberoConfig(tasks=("libero_goal/7",), held_out=HeldOutConfig(init_states="48-49"))
    evaluator = HeldOutEvaluator(held_out_episodes(config), contact_sheet=full_disk)
    await evaluator(run, SimpleNamespace(num_envs=1), SimpleNamespace(weight_version=0))  # type: ignore[arg-type]
    assert [record.start for record in read_records(run.path / SUCCESSES.file)] == [48, 49]
    assert evaluator.num_failed_sheets == 2
    assert caplog.text.count("no space left") == 1


async def test_held_out_results_wait_for_room_on_a_full_disk_and_never_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(monkeypatch)

    async def run_missing(
        pool: Any, engine: Any, agent: Any, missing: Sequence[EpisodeSpec], done: Any
    ) -> None:
        for episode in missing:
            disk.room = {44: 100, 47: None}.get(episode.options["init_state_id"], disk.room)
            await done(
                SimpleNamespace(
                    episode=episode, final_observation={"instruction": "turn on the stove"}, is_success=True,
                    info={**episode.options, "scene_seed": 0}, num_env_steps=7,
                )
            )  # fmt: skip

    monkeypatch.setattr(held_out, "run_each", run_missing)
    run = RunDirectory.create(tmp_path, "evaluated", Config())
    config = SrpoLiberoConfig(tasks=("libero_goal/7",), held_out=HeldOutConfig(init_states="40-48"))
    evaluator = HeldOutEvaluator(held_out_episodes(config))
    await evaluator(run, SimpleNamespace(num_envs=1), SimpleNamespace(weight_version=0))  # type: ignore[arg-type]
    assert [record.start for record in read_records(run.path / SUCCESSES.file)] == list(
        range(40, 49)
    )
    assert caplog.text.count("No space left") == 1


def test_without_assets_the_run_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["srpo_libero", "--run.root", str(tmp_path / "runs"), "--assets", "nowhere"]
    monkeypatch.setattr(sys, "argv", command)
    assert srpo_libero.cli() == 2
    shown = capsys.readouterr().err
    assert "LIBERO's assets were not found in nowhere (no such folder)" in shown
    assert "VLA_RL_LIBERO_ASSETS" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "pipeline", "reward"),
    [
        (SrpoLiberoConfig, "embodied_srpo", "environment"),
        (GrpoLiberoConfig, "embodied_grpo", "success"),
        (PpoLiberoConfig, "embodied_ppo", "success"),
    ],
)
def test_each_recipe_trains_by_its_pipeline_in_the_fast_simulator(
    recipe: type[SrpoLiberoConfig], pipeline: str, reward: str
) -> None:
    config = parse_command(TrainingLaunch, recipe, "RL on LIBERO.", []).config
    assert (config.pipeline, config.reward.function) == (pipeline, reward)
    assert (config.learner.loss.clip_low, config.learner.loss.clip_high) == (0.2, 0.28)
    assert {start.env.kwargs["physics"] for start in training_starts(config)} == {"fast"}
    graph = TrainingRun(config, training_starts(config), OpenVlaOft.create(tiny(), seed=0)).graph
    assert graph.id == pipeline
    assert "videos" in graph.nodes


def test_images_are_as_the_policy_saw_them_in_training_unless_said_otherwise(
    tmp_path: Path,
) -> None:
    for config, quality, size in [
        (SrpoLiberoConfig(), "fast", 84),
        (SrpoLiberoConfig(policy=str(tmp_path)), "exact", 256),
        (SrpoLiberoConfig(quality="exact", image_size=96), "exact", 96),
        (SrpoLiberoConfig(policy=str(tmp_path), quality="fast"), "fast", 256),
    ]:
        assert {start.env.kwargs["quality"] for start in training_starts(config)} == {quality}
        assert {start.env.kwargs["image_size"] for start in training_starts(config)} == {size}
        assert {episode.env.kwargs["image_size"] for episode in held_out_episodes(config)} == {size}
        assert {episode.env.kwargs["quality"] for episode in held_out_episodes(config)} == {quality}


def test_training_episodes_are_cut_short_for_the_policy_that_ships_and_held_out_ones_never(
    tmp_path: Path,
) -> None:
    for config, limit in [
        (SrpoLiberoConfig(), 160),
        (SrpoLiberoConfig(step_limit=300), 300),
        (SrpoLiberoConfig(policy=str(tmp_path)), None),
        (SrpoLiberoConfig(policy=str(tmp_path), step_limit=50), 50),
    ]:
        assert {start.env.kwargs["step_limit"] for start in training_starts(config)} == {limit}
        assert {episode.env.kwargs["step_limit"] for episode in held_out_episodes(config)} == {None}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "run"),
        (["--policy", "somewhere/else"], None),
        (["--config", "srpo_openvla_oft_libero_goal"], None),
        (["--policy", "somewhere/else", "--learner.optimizer.decay-steps", "run"], "run"),
        (["--learner.optimizer.decay-steps", "50"], 50),
        (["--learner.optimizer.decay-steps", "None"], None),
    ],
)
def test_the_learning_rate_of_the_shipped_policy_decays_until_the_run_ends(
    options: list[str], expected: object
) -> None:
    config = parse_command(TrainingLaunch, SrpoLiberoConfig, "", options).config
    assert config.learner.optimizer.decay_steps == expected


def test_held_out_starts_are_not_those_of_training() -> None:
    config = SrpoLiberoConfig(
        tasks=("libero_object/1,4",), held_out=HeldOutConfig(init_states="48-49", scene_seeds="1-2")
    )
    episodes = held_out_episodes(config)
    assert len(episodes) == 8
    assert {episode.options["init_state_id"] for episode in episodes} == {48, 49}
    assert all(
        episode.sampling.greedy and episode.env.kwargs["physics"] == "exact" for episode in episodes
    )
    with pytest.raises(
        ConfigError, match="the first 40 are trained on; expected numbers from 40 on"
    ):
        SrpoLiberoConfig(held_out=HeldOutConfig(init_states="39-49"))


def test_groups_of_a_task_start_from_the_training_states_only() -> None:
    starts = training_starts(
        SrpoLiberoConfig(tasks=("libero_object/1", "libero_goal/4"), train_init_states=2)
    )
    assert [(start.env.id, start.env.kwargs["task_id"], start.options["init_state_id"]) for start in starts] == [
        ("vla_rl/libero_object-v0", 1, 0), ("vla_rl/libero_object-v0", 1, 1),
        ("vla_rl/libero_goal-v0", 4, 0), ("vla_rl/libero_goal-v0", 4, 1),
    ]  # fmt: skip


def test_tasks_are_named_by_suite_and_number_each_chosen_once() -> None:
    tasks = SrpoLiberoConfig(
        tasks=("libero_object/8,0-1", "libero_goal", "libero_object/1-2")
    ).chosen_tasks
    of_object = ["libero_object/8", "libero_object/0", "libero_object/1"]
    assert [task.key for task in tasks] == [
        *of_object,
        *(f"libero_goal/{number}" for number in range(10)),
        "libero_object/2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tasks", "libero_object/10"],
            "tasks of libero_object are '10', expected numbers from 0 to 9",
        ),
        (
            ["--tasks", "libero_object/one"],
            "expected 'all', numbers from 0 to 9, ranges such as 0-3",
        ),
        (["--tasks", "libero_objects"], "suite is 'libero_objects', did you mean 'libero_object'?"),
    ],
)
def test_a_task_that_does_not_exist_is_refused_before_anything_starts(
    arguments: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        parse_command(TrainingLaunch, SrpoLiberoConfig, "SRPO on LIBERO.", arguments)
    assert message in str(caught.value)


def test_a_policy_is_trained_whole_or_by_adapters_and_recomputes_where_it_is_told(
    tmp_path: Path,
) -> None:
    OpenVlaOft.create(tiny(image_size=28), seed=0).save(tmp_path / "base")
    whole = starting_policy(SrpoLiberoConfig(policy=str(tmp_path / "base")))
    assert all(parameter.requires_grad for parameter in whole.network.parameters())
    config = SrpoLiberoConfig(
        policy=str(tmp_path / "base"),
        lora_rank=4,
        recompute_activations=True,
        compile_blocks=True,
    )
    adapted = starting_policy(config)
    assert adapted.recomputes_activations
    assert adapted.compiles_blocks
    assert not whole.compiles_blocks
    trained = [
        name for name, parameter in adapted.network.named_parameters() if parameter.requires_grad
    ]
    assert all(".lora_" in name or name.startswith("proprio_projector.") for name in trained)
    assert len(trained) > 0


def test_an_openvla_checkpoint_can_be_trained(tmp_path: Path) -> None:
    shared = {
        name: getattr(tiny(image_size=28), name)
        for name in OpenVlaConfig.__struct_fields__
        if name != "vocabulary"
    }
    OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0).save(
        tmp_path / "openvla"
    )
    assert (
        starting_policy(SrpoLiberoConfig(policy=str(tmp_path / "openvla"))).config.chunk_size == 1
    )


def test_a_policy_without_a_likelihood_is_refused(tmp_path: Path) -> None:
    ContinuousOpenVlaOft.create(tiny(image_size=28, head="diffusion"), seed=0).save(
        tmp_path / "diffusion"
    )
    with pytest.raises(ConfigError, match="diffusion head, which gives no likelihood"):
        starting_policy(SrpoLiberoConfig(policy=str(tmp_path / "diffusion")))
