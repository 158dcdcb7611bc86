"""DAgger's recipe: the scripted expert acts in LIBERO and its labels are stored; another policy is an expert too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import DeviceLane, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.models.example_inputs import example_observation
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.shipped import PLACEHOLDER_BASE_POLICY, SHIPPED
from vla_rl.models.steered import SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.dagger_libero import DaggerLiberoConfig, open_agent
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig
from vla_rl.recipes.suite_training import training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import EpisodePolicy, SchedulerConfig
from vla_rl.rollout.expert_agent import InterventionConfig
from vla_rl.run.train import train
from vla_rl.types import ChunkOutcome, EnvSpec, EpisodeSpec, Info, Observation, Sampling


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    OpenVlaOft.create(tiny(), seed=0).save(folder)
    return folder


def small(tmp_path: Path, base: Path, **changed: Any) -> DaggerLiberoConfig:
    return DaggerLiberoConfig(
        run=RunConfig(name="dagger", root=str(tmp_path), updates=1),
        tasks=("libero_goal/8",),
        assets="stand-ins",
        step_limit=16,
        image_size=64,
        policy=str(base),
        simulators=SimulatorConfig(num_envs=1),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        off_policy=OffPolicyConfig(algorithm="dagger", first_rows=1, batch=8),
        held_out=HeldOutConfig(init_states=None),
        **changed,
    )


@pytest.mark.timeout(300)
async def test_a_head_is_trained_on_what_the_scripted_expert_of_libero_does(
    tmp_path: Path, base: Path
) -> None:
    config = small(tmp_path, base, intervention=InterventionConfig(beta=0.5))
    model = config.load_starting_policy()
    before = {name: each.clone() for name, each in model.network.state_dict().items()}
    async with open_agent(config) as agent:
        outcome = await train(config, training_starts(config), model, agent=agent)
    assert any(not before[name].equal(each) for name, each in model.network.state_dict().items())
    (line,) = read_metrics(outcome.run.path / "metrics.jsonl")
    assert 0.0 < line["replay/intervened_share"] < 1.0
    assert line["off_policy/steps"] > 0


class Still:
    """An environment in which nothing happens, with the observations that the base reads."""

    def __init__(self, seen: Observation) -> None:
        self.episode = EpisodeSpec(
            episode_id=0, group_id=0, member=0, env=EnvSpec(id="still"), task="t", seed=0, policy_seed=0
        )  # fmt: skip
        self._seen = seen

    async def reset(self) -> tuple[Observation, Info]:
        return self._seen, {}

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        rewards = np.zeros(len(actions), np.float32)
        return ChunkOutcome(
            observation=self._seen, rewards=rewards, terminated=False, truncated=True, info={}
        )


@pytest.mark.parametrize("named", [False, True])
async def test_the_expert_may_be_another_policy_in_this_process(
    tmp_path: Path, base: Path, named: bool
) -> None:
    expert = str(tmp_path / "expert")
    other = OpenVlaOft.create(tiny(), seed=1)
    other.save(Path(expert))
    if named:
        expert, other = SHIPPED, OpenVlaOft.load(PLACEHOLDER_BASE_POLICY)
    config = small(tmp_path, base, expert=expert, intervention=InterventionConfig(beta=0.0))
    assert training_starts(config)[0].env.id == "vla_rl/libero_goal-v0"
    seen = example_observation(other, 0)
    assert seen is not None
    env = Still(seen)
    model = config.load_starting_policy()
    async with (
        open_agent(config) as agent,
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, config.engine) as engine,
        TorchActionEngine(other, lane, config.engine) as asked,
    ):
        trajectory = await agent(env, EpisodePolicy(engine, env.episode))
        expected = await asked.act(seen, Sampling(greedy=True))
    (step,) = trajectory.steps
    assert step.expert_actions is not None
    assert np.array_equal(step.expert_actions, expected.actions)
    assert not np.array_equal(step.chunk.actions, expected.actions)


def test_without_another_expert_the_environments_suggest(tmp_path: Path, base: Path) -> None:
    env = training_starts(small(tmp_path, base))[0].env
    assert (env.id, env.kwargs["expert_rows"]) == ("vla_rl/libero_goal-expert-v0", 8)


def test_a_head_that_steers_and_reads_beyond_the_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind is 'noise', expected residual: an expert's chunk"):
        DaggerLiberoConfig(steering=SteeringConfig(kind="noise"))
    with pytest.raises(ConfigError, match="proprio_size is 9, expected at most 8"):
        OffPolicyLiberoConfig(steering=SteeringConfig(proprio_size=9))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--expert", "x", "--expert-rows", "4"], "expert_rows is 4"),
        (["--replay.from", "x", "--expert", "ws://h:1"], "expert is 'ws://h:1'"),
        (["--replay.from", "x", "--intervention.beta", "0.1"], "intervention.beta is 0.1"),
    ],
)
def test_options_of_an_expert_that_is_not_asked_are_refused(
    arguments: list[str], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"{option}, but nothing would read it"):
        parse_command(TrainingLaunch, DaggerLiberoConfig, "", arguments)


def test_options_of_a_policy_server_are_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="no policy server"):
        parse_command(TrainingLaunch, DaggerLiberoConfig, "", ["--server.replan", "4"])
