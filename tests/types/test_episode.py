"""Episodes hold plain values; seeds are derived by name."""

import msgspec
import numpy as np
import pytest

from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, WrapperSpec, derive_seed


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
