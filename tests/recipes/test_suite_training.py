"""Tasks, starts and the base policy of a training recipe, by the example of LIBERO's."""

from pathlib import Path

import pytest

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.models.openvla import OpenVla, OpenVlaConfig
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.recipes.libero_training import HeldOutConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.suite_training import held_out_episodes, starting_policy, starts_of


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
    starts = starts_of(
        SrpoLiberoConfig(tasks=("libero_object/1", "libero_goal/4"), train_init_states=2)
    )
    assert [(start.env.id, start.env.kwargs["task_id"], start.options["init_state_id"]) for start in starts] == [
        ("vla_rl/libero_object-v0", 1, 0), ("vla_rl/libero_object-v0", 1, 1),
        ("vla_rl/libero_goal-v0", 4, 0), ("vla_rl/libero_goal-v0", 4, 1),
    ]  # fmt: skip


def test_tasks_are_named_by_suite_and_number_each_played_once() -> None:
    tasks = SrpoLiberoConfig(
        tasks=("libero_object/8,0-1", "libero_goal", "libero_object/1-2")
    ).played
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
        (["--train-init-states", "0"], "train_init_states is 0, expected 1 to 100000 starts"),
        (["--step-limit", "0"], "step_limit is 0, expected at least 1 control step"),
        (["--held-out.step-limit", "0"], "step_limit is 0, expected at least 1 control step"),
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
