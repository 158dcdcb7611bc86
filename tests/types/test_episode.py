"""The specification of an episode crosses processes as plain values."""

import msgspec
import pytest

from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, WrapperSpec

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
