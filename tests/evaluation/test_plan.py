"""The plan of an evaluation has every episode once, with the pictures that a policy knows."""

import msgspec
import pytest

from vla_rl.evaluation.plan import planned_episodes
from vla_rl.recipes.eval_libero import EvalLiberoConfig


def test_the_plan_holds_every_task_state_and_scene_once_with_seeds_of_its_own() -> None:
    config = EvalLiberoConfig(
        suites=("libero_goal", "libero_object"), tasks="1,3", init_states="40-42", scene_seeds="0,7"
    )
    episodes = planned_episodes(config)
    assert len(episodes) == len({episode.policy_seed for episode in episodes}) == 2 * 2 * 3 * 2
    assert {episode.options["init_state_id"] for episode in episodes} == {40, 41, 42}
    assert {episode.env.kwargs["scene_seed"] for episode in episodes} == {0, 7}
    assert all(episode.sampling.greedy for episode in episodes)
    # a narrower plan plays the same episodes in the same way
    narrow = planned_episodes(
        msgspec.structs.replace(
            config, suites=("libero_object",), init_states="42", temperature=1.6
        )
    )
    seeds = {
        (e.task, e.options["init_state_id"], e.env.kwargs["scene_seed"]): e.policy_seed
        for e in episodes
    }
    for episode in narrow:
        key = (episode.task, 42, episode.env.kwargs["scene_seed"])
        assert seeds[key] == episode.policy_seed
        assert (episode.sampling.greedy, episode.sampling.temperature) == (False, 1.6)


def test_a_whole_suite_has_its_500_episodes() -> None:
    assert len(planned_episodes(EvalLiberoConfig(suites=("libero_spatial",)))) == 500


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EvalLiberoConfig(tasks="0", init_states="0"), (84, "fast")),
        (EvalLiberoConfig(checkpoint="theirs", tasks="0", init_states="0"), (256, "exact")),
        (
            EvalLiberoConfig(tasks="0", init_states="0", image_size=64, quality="exact"),
            (64, "exact"),
        ),
    ],
)
def test_pictures_are_those_that_a_policy_was_taught_with_unless_others_are_asked_for(
    config: EvalLiberoConfig, expected: tuple[int, str]
) -> None:
    (episode,) = planned_episodes(config)
    assert (episode.env.kwargs["image_size"], episode.env.kwargs["quality"]) == expected
