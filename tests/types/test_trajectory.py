"""Episodes hold plain values, are split by agent, count exactly what ran."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from vla_rl.errors import ConfigError
from vla_rl.learner.checkpoint.state import pack, unpack
from vla_rl.types import (
    MAX_LOG_PROB,
    SOLE_MEMBER,
    ActionChunk,
    AgentNames,
    EnvSpec,
    EpisodeSpec,
    Group,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    WrapperSpec,
    derive_seed,
    key_by_member,
    list_agents,
    split_by_agent,
)
from vla_rl.types.trajectory import find_impossible_log_prob

EPISODE = EpisodeSpec(
    episode_id=0,
    group_id=0,
    member=0,
    env=EnvSpec(id="vla_rl/toy_reach-v0"),
    task="toy/0",
    seed=1,
    policy_seed=2,
)


def step(num_executed: int, version: int) -> Step:
    chunk = ActionChunk(
        actions=np.zeros((8, 7), np.float32),
        tokens=np.zeros(56, np.int64),
        log_probs=np.zeros(56, np.float32),
        weight_version=version,
    )
    return Step(observation={}, chunk=chunk, rewards=np.full(num_executed, 0.5, np.float32))


def trajectory(stop_reason: StopReason) -> Trajectory:
    steps = (step(8, version=4), step(8, version=5), step(3, version=5))
    return Trajectory(episode=EPISODE, steps=steps, final_observation={}, stop_reason=stop_reason)


def test_a_trajectory_counts_the_rows_that_ran() -> None:
    record = trajectory(StopReason.SUCCESS)
    assert record.num_env_steps == 19
    assert record.undiscounted_return == 9.5


def test_staleness_is_counted_from_the_oldest_chunk() -> None:
    record = trajectory(StopReason.TIME_LIMIT)
    assert (record.oldest_version, record.newest_version) == (4, 5)


def test_only_success_is_success() -> None:
    successes = {reason for reason in StopReason if trajectory(reason).is_success}
    assert successes == {StopReason.SUCCESS, StopReason.SUCCESS_AT_LIMIT}


def test_success_is_known_from_the_info_or_from_the_agent() -> None:
    silent = trajectory(StopReason.TIME_LIMIT)
    assert not silent.is_success_known
    assert msgspec.structs.replace(silent, info={"is_success": False}).is_success_known
    assert trajectory(StopReason.SUCCESS).is_success_known


def test_an_episode_is_ended_by_the_environment_or_by_a_limit_of_the_agent() -> None:
    agents_limits = {reason for reason in StopReason if not reason.is_of_environment}
    assert agents_limits == {
        StopReason.TURN_LIMIT,
        StopReason.TOKEN_LIMIT,
        StopReason.DEADLINE,
        StopReason.ABORTED,
        StopReason.REPLY_REJECTED,
    }


def test_only_what_we_ended_was_cut_off() -> None:
    own_endings = {reason for reason in StopReason if not reason.is_cut_off}
    assert own_endings == {
        StopReason.SUCCESS,
        StopReason.TERMINATED,
        StopReason.REPLY_REJECTED,  # nothing is left to come: the policy cannot go on
    }


def test_a_group_knows_its_task_and_its_success_rate() -> None:
    members = tuple(
        trajectory(reason)
        for reason in (StopReason.SUCCESS, StopReason.TIME_LIMIT, StopReason.TIME_LIMIT)
    )
    group = Group(group_id=0, trajectories=members, dispatch_version=4)
    assert group.task == "toy/0"
    assert group.success_rate == 1 / 3


def test_only_tokens_of_control_steps_that_ran_are_executed() -> None:
    ran = step(3, version=0).executed_tokens
    assert ran.tolist() == [True] * 21 + [False] * 35
    assert trajectory(StopReason.SUCCESS).num_executed_tokens == 56 + 56 + 21


def test_tokens_of_control_steps_that_an_expert_chose_are_not_executed() -> None:
    mixed = msgspec.structs.replace(
        step(3, version=0), intervened=np.array([False, True, True])
    ).executed_tokens
    assert mixed.tolist() == [True] * 7 + [False] * 49


def test_steps_of_files_that_know_no_expert_still_load() -> None:
    class OldStep(msgspec.Struct, kw_only=True):
        observation: dict[str, np.ndarray]
        chunk: ActionChunk
        rewards: np.ndarray
        frames: np.ndarray | None = None
        frames_key: str | None = None
        agent: str = "policy"

    new = step(8, version=3)
    old = OldStep(observation={}, chunk=new.chunk, rewards=new.rewards)
    loaded = unpack(pack(old), Step)
    assert (loaded.intervened, loaded.expert_actions) == (None, None)
    assert np.array_equal(loaded.rewards, new.rewards)


def test_tokens_that_control_steps_cannot_share_are_refused() -> None:
    chunk = msgspec.structs.replace(step(8, version=0).chunk, tokens=np.zeros(55, np.int64))
    with pytest.raises(ValueError, match="55 tokens for 8 control steps"):
        _ = chunk.tokens_per_step


IDS = np.array([3, 1, 2])


@pytest.mark.parametrize("impossible", [np.nan, np.inf, -np.inf, 2 * MAX_LOG_PROB])
def test_the_first_impossible_log_prob_of_a_token_is_found(impossible: float) -> None:
    log_probs = np.array([-0.5, impossible, impossible], np.float32)
    assert find_impossible_log_prob(log_probs, IDS) == 1


def test_a_certain_token_may_be_rounded_to_a_little_above_zero() -> None:
    log_probs = np.array([-0.5, 0.0, MAX_LOG_PROB / 2], np.float32)
    assert find_impossible_log_prob(log_probs, IDS) is None


def test_the_density_of_a_number_may_be_above_one() -> None:
    numbers = np.array([0.1, 0.2, 0.3], np.float32)
    assert find_impossible_log_prob(np.array([2.0, -1.0, 5.0]), numbers) is None
    assert find_impossible_log_prob(np.array([2.0, -1.0, np.inf]), numbers) == 2


def test_a_seed_depends_on_its_name_and_nothing_else() -> None:
    assert derive_seed(7, "episode", 3) == derive_seed(7, "episode", 3)
    names = [
        (7, "episode", 3),
        (7, "episode", 4),
        (8, "episode", 3),
        (7, "shuffle", 3),
        (7, "episode"),
        (7, "episode", "3"),
    ]
    assert len({derive_seed(*name) for name in names}) == len(names)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, "run") == 492060536513082702


def test_seeds_fit_a_signed_64_bit_integer() -> None:
    assert all(0 <= derive_seed(0, k) < 2**63 for k in range(1000))


def test_an_integer_of_numpy_gives_the_seed_of_the_same_number_and_other_types_are_refused() -> (
    None
):
    assert derive_seed(np.int64(7), "e", np.int32(3)) == derive_seed(7, "e", 3)
    assert derive_seed(7, np.str_("e")) == derive_seed(7, "e")
    for part in (3.0, None, ("e", 3)):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            derive_seed(7, "e", part)  # type: ignore[arg-type]


SPEC = EpisodeSpec(
    episode_id=7,
    group_id=2,
    member=1,
    env=EnvSpec(
        id="vla_rl/toy_reach-v0",
        kwargs={"task_id": 3, "near": [0.5]},
        wrappers=(WrapperSpec(path="my:Wrapper", kwargs={"scale": 2}),),
    ),
    task="toy/3",
    seed=11,
    policy_seed=13,
    options={"init_state_id": 4},
    sampling=Sampling(temperature=0.7, greedy=True),
    attempt=1,
)


def test_a_specification_is_the_same_after_a_message() -> None:
    read = msgspec.json.decode(msgspec.json.encode(SPEC), type=EpisodeSpec)
    assert read == SPEC


def test_a_new_episode_is_sampled_at_temperature_one_and_has_had_no_attempt() -> None:
    plain = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="x", seed=0, policy_seed=0
    )
    assert plain.sampling == Sampling(temperature=1.0, greedy=False, seed=0)
    assert (plain.attempt, plain.options, plain.env.wrappers) == (0, {}, ())


def test_a_specification_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SPEC.attempt = 2  # type: ignore[misc]


def episode(*turns: tuple[str, float], stop: StopReason = StopReason.TIME_LIMIT) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 1)),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    steps = tuple(
        Step(observation={}, chunk=chunk, rewards=np.array([reward], np.float32), agent=agent)
        for agent, reward in turns
    )
    spec = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="x", seed=0, policy_seed=0
    )
    return Trajectory(episode=spec, steps=steps, final_observation={}, stop_reason=stop)


SHARED = episode(("solver", 1.0), ("checker", 2.0), ("solver", 4.0))

ALONE = episode(("checker", 8.0))


def test_a_part_has_the_agents_decisions_and_knows_where_they_stood() -> None:
    assert list_agents([SHARED, ALONE]) == ["solver", "checker"]
    (solver,) = split_by_agent([ALONE, SHARED], "solver")
    assert (solver.row, solver.decisions) == (1, (0, 2))
    assert [step.rewards.tolist() for step in solver.trajectory.steps] == [[1.0], [4.0]]
    checker = split_by_agent([ALONE, SHARED], "checker")
    assert [(part.row, part.decisions) for part in checker] == [(0, (0,)), (1, (1,))]
    assert checker[0].trajectory is ALONE
    assert split_by_agent([SHARED], "nobody") == []


def test_only_who_decided_last_was_cut_off() -> None:
    (solver,), (checker,) = split_by_agent([SHARED], "solver"), split_by_agent([SHARED], "checker")
    assert solver.trajectory.stop_reason is StopReason.TIME_LIMIT
    assert checker.trajectory.stop_reason is StopReason.TERMINATED


def test_a_success_is_everybodys() -> None:
    (checker,) = split_by_agent(
        [msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS)], "checker"
    )
    assert checker.trajectory.is_success
    limited = msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS_AT_LIMIT)
    (solver,), (checker,) = (
        split_by_agent([limited], "solver"),
        split_by_agent([limited], "checker"),
    )
    assert solver.trajectory.stop_reason is StopReason.SUCCESS_AT_LIMIT
    # the solver decided last: nothing more was to come
    assert checker.trajectory.stop_reason is StopReason.SUCCESS


def test_returns_are_counted_by_agent() -> None:
    assert SHARED.returns_by_agent == {"solver": 5.0, "checker": 2.0}
    assert SHARED.undiscounted_return == 7.0


ONE = AgentNames([SOLE_MEMBER])

PAIR = AgentNames(["solver", "checker"])


def make_episode(agents: Sequence[str]) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    return Trajectory(
        episode=EpisodeSpec(
            episode_id=0,
            group_id=0,
            member=0,
            env=EnvSpec(id="x"),
            task="x",
            seed=0,
            policy_seed=0,
        ),
        steps=tuple(
            Step(observation={}, chunk=chunk, rewards=np.zeros(1, np.float32), agent=agent)
            for agent in agents
        ),
        final_observation={},
        stop_reason=StopReason.TERMINATED,
    )


def test_one_policy_acts_for_agents_of_any_name_and_gets_their_episodes_whole() -> None:
    trajectory = make_episode(["solver", "checker"])
    (part,) = ONE.split_by_member([trajectory], SOLE_MEMBER)
    assert part.trajectory is trajectory
    assert part.decisions == (0, 1)
    assert ONE.get_member("whoever") == SOLE_MEMBER
    ONE.require_members([trajectory])


def test_one_policy_leaves_no_name_in_metrics_and_seeds() -> None:
    assert (ONE.get_prefix(SOLE_MEMBER), ONE.derive_seed(7, SOLE_MEMBER)) == ("", 7)
    assert PAIR.get_prefix("solver") == "solver/"
    assert PAIR.derive_seed(7, "solver") == derive_seed(7, "solver")


def test_a_member_gets_the_decisions_of_its_own_agent() -> None:
    (part,) = PAIR.split_by_member([make_episode(["solver", "checker", "solver"])], "solver")
    assert part.decisions == (0, 2)
    assert PAIR.get_member("solver") == "solver"


def test_an_agent_without_a_member_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"agent 'judge' has no policy, .*\['checker', 'solver'\]"
    ):
        PAIR.require_members([make_episode(["solver", "judge"])])
    with pytest.raises(KeyError):
        PAIR.get_member("judge")


def test_a_team_of_one_named_member_acts_for_its_own_agent_only() -> None:
    solver = AgentNames(["solver"])
    assert not solver.acts_for_all
    assert solver.get_prefix("solver") == "solver/"


def test_agent_names_are_equal_in_any_order() -> None:
    assert AgentNames(["checker", "solver"]) == PAIR != ONE
    assert len({AgentNames(["checker", "solver"]), PAIR}) == 1


def test_a_policy_without_a_name_is_a_team_of_one() -> None:
    policy: dict[str, object] = {}
    assert key_by_member(object()).keys() == {SOLE_MEMBER}  # type: ignore[arg-type]
    assert key_by_member(policy) is policy  # type: ignore[arg-type]
