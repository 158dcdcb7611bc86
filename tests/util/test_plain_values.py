"""NumPy's numbers become Python's own, in every configuration and in what describes an episode."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import vla_rl.recipes.grpo_text
import vla_rl.recipes.srpo_libero
import vla_rl.recipes.train_toy  # noqa: F401 - they bring nearly all configurations
from vla_rl.env_workers.make_env import prepare_hook
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import RunConfig
from vla_rl.reporting.run_directory import require_plain
from vla_rl.rollout import TaskStart
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling, WrapperSpec
from vla_rl.util.plain_values import part_without_json, plain


def configs_below(config: type[Config]) -> Iterator[type[Config]]:
    for each in config.__subclasses__():
        if each.__module__.startswith("vla_rl."):
            yield each
        yield from configs_below(each)


def can_be_made(config: type[Config]) -> bool:
    """Return whether all fields have values that suit each other."""
    try:
        config()
    except (TypeError, ConfigError):
        return False
    return True


CONFIGS = {
    f"{each.__module__}.{each.__qualname__}": each
    for each in configs_below(Config)
    if can_be_made(each)
}


def in_numpy(value: Any) -> Any:
    kinds = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}
    if type(value) in kinds:
        return kinds[type(value)](value)
    return tuple(map(in_numpy, value)) if type(value) is tuple else value


def same_kinds(value: Any, other: Any) -> bool:
    if type(value) is tuple:
        return len(value) == len(other) and all(map(same_kinds, value, other))
    return type(value) is type(other)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_of_numpys_numbers_is_that_of_pythons_own(name: str) -> None:
    plainly = CONFIGS[name]()
    fields = {field: getattr(plainly, field) for field in plainly.__struct_fields__}
    found = CONFIGS[name](**{field: in_numpy(value) for field, value in fields.items()})
    assert found == plainly
    for field, value in fields.items():
        assert same_kinds(value, getattr(found, field)), field
    assert msgspec.json.encode(found) == msgspec.json.encode(plainly)


def test_nearly_all_configurations_were_tried() -> None:
    assert len(CONFIGS) > 30


def test_what_describes_an_episode_holds_plain_numbers() -> None:
    env = EnvSpec(
        id="vla_rl/toy_reach-v0",
        kwargs={"size": np.int64(2), "deep": [{"x": (np.float32(0.5), np.bool_(True))}]},
        wrappers=(WrapperSpec(path="m:W", kwargs={"n": np.uint8(3)}),),
    )
    assert env.kwargs == {"size": 2, "deep": [{"x": (0.5, True)}]}
    start = TaskStart(env=env, task="t", seed=np.int64(4), options={"init_state_id": np.int64(2)})
    episode = EpisodeSpec(
        episode_id=np.int64(0),
        group_id=0,
        member=0,
        env=env,
        task="t",
        seed=np.int64(1),
        policy_seed=0,
        options={"k": np.float64(0.25)},
        sampling=Sampling(temperature=np.float32(0.5)),
    )
    text = msgspec.json.encode([env, start, episode])
    again = msgspec.json.decode(text)
    assert again[0]["kwargs"] == {"size": 2, "deep": [{"x": [0.5, True]}]}
    assert again[0]["wrappers"][0]["kwargs"] == {"n": 3}
    assert (again[1]["seed"], again[1]["options"]) == (4, {"init_state_id": 2})
    assert (again[2]["options"], again[2]["sampling"]["temperature"]) == ({"k": 0.25}, 0.5)


def test_a_run_of_a_numpy_number_of_updates_is_one_of_as_many() -> None:
    config = RunConfig(updates=np.int64(3))  # type: ignore[arg-type]
    assert (config.updates, type(config.updates)) == (3, int)


def test_what_is_plain_is_the_same_object_afterwards() -> None:
    value = {"a": [1, (2.0, "x")], 3: None}
    assert plain(value) is value
    array = {"a": np.zeros(2)}
    assert plain(array) is array


def test_an_argument_that_no_other_process_could_get_is_named() -> None:
    env = EnvSpec(id="a/b-v0", kwargs={"size": {"low": [0, np.zeros(3)]}})
    expected = r"the EnvSpec of a/b-v0.kwargs\['size'\]\['low'\]\[1\] is array\(\[0., 0., 0.\]\), a ndarray"
    with pytest.raises(ConfigError, match=expected):
        prepare_hook([env])
    with pytest.raises(ConfigError, match=r"config\['a'\] is <object object"):
        require_plain({"a": object()}, "config")
    assert part_without_json({"a": [1, None]}, "config") is None
