"""A list of episodes is run, each once, by the weights of one checkpoint, whatever dies or moves meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from small_worlds import LONG, SHORT, UnevenEnv, policy_that_acts, starts
from toy_runs import STILL, FixedAnswer, evaluate_offline, evaluated, run_toys, toy_episodes

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ActorDied, ConfigError, EnvError, PolicyError
from vla_rl.evaluation import checkpoint_evaluator, within_range
from vla_rl.evaluation.checkpoint_evaluator import (
    EvaluatorSettings,
    evaluate_checkpoint,
    evaluator_settings,
)
from vla_rl.evaluation.records import EpisodeRecord, episode_key
from vla_rl.models.mlp import MlpPolicy
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import EpisodeLost, embodied_agent
from vla_rl.types import Config, EnvSpec


async def test_every_episode_is_run_once() -> None:
    trajectories = await run_toys(embodied_agent, toy_episodes(5))
    assert [trajectory.episode.options["init_state_id"] for trajectory in trajectories] == [
        0,
        1,
        2,
        3,
        4,
    ]
    again = await run_toys(embodied_agent, toy_episodes(5)[3:], num_envs=1)
    assert np.array_equal(
        again[0].final_observation["state"], trajectories[3].final_observation["state"]
    )


async def test_an_episode_whose_simulator_died_is_run_again(tmp_path: Path) -> None:
    env = EnvSpec(
        id="vla_rl/faulty-v0", kwargs={"fault": "kill", "times": 1, "ledger": str(tmp_path)}
    )
    (trajectory,) = await run_toys(embodied_agent, toy_episodes(1, env), num_envs=1)
    assert trajectory.episode.attempt == 1


async def test_an_episode_that_is_always_lost_ends_it(tmp_path: Path) -> None:
    env = EnvSpec(
        id="vla_rl/faulty-v0", kwargs={"fault": "kill", "times": 9, "ledger": str(tmp_path)}
    )
    with pytest.raises(EpisodeLost) as caught:
        await run_toys(embodied_agent, toy_episodes(1, env), num_envs=1, max_attempts=2)
    assert caught.value.__notes__ == ["that was the last of max_attempts=2"]


async def test_an_environment_that_breaks_its_contract_ends_it_with_its_own_error() -> None:
    env = EnvSpec(id="vla_rl/faulty-v0", kwargs={"fault": "raise"})
    with pytest.raises(EnvError):
        await run_toys(embodied_agent, toy_episodes(4, env))


OUT_OF_RANGE = [1.5, -2.0, 0.25, 0.0, 0.0, 0.0, 0.0]


async def test_actions_are_cut_off_where_libero_s_controller_cuts_them_off() -> None:
    (trajectory,) = await run_toys(
        within_range(embodied_agent), toy_episodes(1), engine=FixedAnswer(OUT_OF_RANGE)
    )
    chunk = trajectory.steps[0].chunk
    assert chunk.actions[0, :3].tolist() == [1.0, -1.0, 0.25]
    assert chunk.tokens.tolist() == OUT_OF_RANGE
    with pytest.raises(ValueError, match=r"holds 1\.5 at"):
        await run_toys(embodied_agent, toy_episodes(1), engine=FixedAnswer(OUT_OF_RANGE))


async def test_a_policy_whose_numbers_are_none_is_named_at_once() -> None:
    with pytest.raises(PolicyError, match=r"\('toy/0'\) is nan, with the weights after 4 updates"):
        await run_toys(embodied_agent, toy_episodes(1), engine=FixedAnswer(STILL, float("nan")))


def settings(model: object, num_envs: int = 3) -> EvaluatorSettings:
    simulators = SimulatorConfig(num_envs=num_envs)
    return evaluator_settings(model, "success_rate", None, simulators, torch_threads=1, niceness=1)


def first_finished(num: int, num_envs: int, steps_per_update: int) -> tuple[float, set[int]]:
    """The success rate of the first episodes to end, and the versions that acted in them.

    Each environment begins again at once, and the weights move on meanwhile: all but the first
    weights act as the newest policy does.
    """
    envs = [UnevenEnv() for _ in range(num_envs)]
    for number, env in enumerate(envs):
        env.reset(options={"init_state_id": number})
    solved: list[bool] = []
    versions = set()
    step = 0
    while len(solved) < num:
        version = step // steps_per_update
        versions.add(version)
        for number, env in enumerate(envs):
            _, _, ends, _, info = env.step([float(version > 0)])  # type: ignore[arg-type]
            if ends:
                solved.append(info["is_success"])
                env.reset(options={"init_state_id": number})
        step += 1
    return sum(solved) / len(solved), versions


def by_key(record: EpisodeRecord) -> Any:
    return record.episode_key


async def test_moving_weights_and_short_successes_do_not_raise_the_result_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    # the wrong design: after 16 control steps, 9 short starts have ended 8 times each, 9 long ones
    # once, and six weight versions have acted: 72 of 81 = .89
    rate, versions = first_finished(81, num_envs=18, steps_per_update=3)
    assert (round(rate, 2), len(versions)) == (0.89, 6)
    assert LONG == 8 * SHORT

    run, episodes = RunDirectory.create(tmp_path, "run", Config()), starts(18)
    live = policy_that_acts(0)
    live.save(tmp_path / "version-3")
    newest = policy_that_acts(1).checkpoint_tensors()
    records: list[EpisodeRecord] = []

    async def done(record: EpisodeRecord) -> None:
        records.append(record)
        live.load_checkpoint_tensors(newest)  # training moves on with the first result

    async with asyncio.timeout(100), Runtime("run") as runtime:
        await evaluate_checkpoint(
            runtime,
            settings(live),
            run,
            3,
            tmp_path / "version-3",
            lambda: episodes[len(records) :],
            done,
        )
    assert sorted(record.episode_key for record in records) == sorted(map(episode_key, episodes))
    assert {record.weights for record in records} == {3}
    assert sum(record.value for record in records) / len(records) == 0.5
    offline = await evaluate_offline(tmp_path / "version-3", episodes, 3)
    assert sorted(records, key=by_key) == sorted(offline, key=by_key)


async def test_a_process_that_dies_is_replaced_and_runs_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    done: list[EpisodeRecord] = []

    async def dies_after_one(*arguments: Any) -> None:
        episodes, store = arguments[5], arguments[6]
        asked.append([episode.episode_id for episode in episodes])
        await store(evaluated(start=episodes[0].episode_id))
        if len(episodes) > 1:
            raise ActorDied("evaluator", 1, "SIGKILL")

    async def store(record: EpisodeRecord) -> None:
        done.append(record)

    monkeypatch.setattr(checkpoint_evaluator, "_evaluate_once", dies_after_one)
    run, episodes = RunDirectory(tmp_path), starts(4)
    nothing: Any = None
    await evaluate_checkpoint(
        nothing, nothing, run, 0, tmp_path, lambda: episodes[len(done) :], store
    )
    assert asked == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    assert [record.start for record in done] == [0, 1, 2, 3]


async def test_processes_that_die_without_a_result_end_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = []

    async def dies(*arguments: Any) -> None:
        deaths.append(1)
        raise ActorDied("evaluator", 1, "SIGKILL")

    monkeypatch.setattr(checkpoint_evaluator, "_evaluate_once", dies)
    nothing: Any = None
    with pytest.raises(ActorDied) as caught:
        await evaluate_checkpoint(
            nothing, nothing, RunDirectory(tmp_path), 7, tmp_path, lambda: starts(2), nothing
        )
    assert len(deaths) == 3
    assert "lower --held-out.simulators" in caught.value.__notes__[0]


def test_a_policy_that_no_other_process_can_load_is_refused() -> None:
    class Nowhere:
        network = policy_that_acts(0).network

    with pytest.raises(ConfigError, match=r"Nowhere has no classmethod load\(folder\)"):
        settings(Nowhere())
    local = type("Local", (MlpPolicy,), {"__qualname__": "f.<locals>.Local"})
    with pytest.raises(ConfigError, match="another process can import"):
        settings(local(policy_that_acts(0).config, policy_that_acts(0).network))


def test_settings_survive_the_way_to_another_process() -> None:
    found = settings(policy_that_acts(0))
    assert found.policy_class == "vla_rl.models.mlp:MlpPolicy"
    assert msgspec.json.decode(msgspec.json.encode(found), type=EvaluatorSettings) == found
