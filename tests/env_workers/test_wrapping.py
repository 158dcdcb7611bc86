"""Wrappers are named here and applied in another process."""

import functools
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit

import vla_rl.envs  # noqa: F401 - registers the environments
from vla_rl.env_workers.make_env import (
    get_wrapper_classes,
    needs_every_step,
    wrap_env,
    wrapper_spec,
)
from vla_rl.errors import EnvError
from vla_rl.types import WrapperSpec

TIME_LIMIT = "gymnasium.wrappers.common:TimeLimit"


def test_a_class_or_a_partial_of_one_is_named_with_its_arguments() -> None:
    assert wrapper_spec(TimeLimit) == WrapperSpec(path=TIME_LIMIT)
    limited = wrapper_spec(functools.partial(TimeLimit, max_episode_steps=3))
    assert limited == WrapperSpec(path=TIME_LIMIT, kwargs={"max_episode_steps": 3})
    assert wrapper_spec(limited) is limited


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (lambda env: env, "cannot be found by another process"),
        (functools.partial(TimeLimit, max_episode_steps={1}), "max_episode_steps is a set"),
        (functools.partial(TimeLimit, 3), "positional arguments, expected keywords only"),
    ],
)
def test_what_cannot_be_sent_is_refused(wrapper: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        wrapper_spec(wrapper)


def test_wrappers_are_applied_from_the_inside_outwards() -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    statistics = wrapper_spec(RecordEpisodeStatistics)
    env = wrap_env(
        bare, [WrapperSpec(path=TIME_LIMIT, kwargs={"max_episode_steps": 3}), statistics]
    )
    assert isinstance(env, RecordEpisodeStatistics)
    assert isinstance(env.env, TimeLimit)
    assert env.env.env is bare
    assert {statistics.path, TIME_LIMIT} <= get_wrapper_classes(env)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gymnasium.wrappers:Nothing", "has no class 'Nothing'"),
        ("nowhere:Wrapper", "module 'nowhere' cannot be found"),
        ("gymnasium", "expected 'module:name'"),
    ],
)
def test_a_wrapper_that_is_not_there_is_named(path: str, said: str) -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    with pytest.raises(EnvError, match=f"the wrapper '{path}'.*({said})"):
        wrap_env(bare, [WrapperSpec(path=path)])


def test_checks_of_gymnasium_need_no_image_of_every_step_and_a_time_limit_may() -> None:
    bare = gymnasium.make("vla_rl/toy_reach-v0").unwrapped
    assert not needs_every_step(OrderEnforcing(bare))
    assert needs_every_step(OrderEnforcing(TimeLimit(bare, 3)))
