"""Values are compared, made plain, shortened for errors, printed as they are."""

import ast
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.table import Table

import vla_rl.recipes.grpo_text
import vla_rl.recipes.srpo_libero
import vla_rl.recipes.train_toy  # noqa: F401 - they bring nearly all configurations
from vla_rl.env_workers.make_env import prepare_hook
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.pipelines.config import RunConfig
from vla_rl.reporting.console import _task_table
from vla_rl.reporting.progress import TaskTally
from vla_rl.reporting.run_directory import require_plain
from vla_rl.rollout import TaskStart
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling, WrapperSpec
from vla_rl.util.values import (
    compare_sources,
    excerpt,
    find_part_without_json,
    make_plain,
    plain_console,
)


def test_a_value_that_both_sources_give_is_returned() -> None:
    assert compare_sources("the rate", ("a.json", 10), ("b.json", 10), remedy="remove one") == 10


def test_two_sources_that_differ_are_named_with_both_values_and_what_to_do() -> None:
    with pytest.raises(CheckpointError) as caught:
        compare_sources("the rate", ("a.json", 10), ("b.json", 30), remedy="remove the wrong one")
    assert str(caught.value) == (
        "two sources of the rate say different things: a.json says 10, b.json says 30, expected "
        "the same; remove the wrong one."
    )


def test_a_reader_of_data_raises_its_own_error() -> None:
    with pytest.raises(DataError, match="two sources of the task"):
        compare_sources("the task", ("a", "open"), ("b", None), remedy="choose", error=DataError)


def test_long_values_are_shown_from_where_they_differ() -> None:
    one, other = "x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500
    with pytest.raises(CheckpointError) as caught:
        compare_sources("the template", ("a", one), ("b", other), remedy="remove one")
    words = str(caught.value)
    assert "xxxayyy" in words
    assert "xxxbyyy" in words
    assert len(words) < 400


def test_a_value_that_continues_the_other_is_shown_with_its_rest() -> None:
    with pytest.raises(CheckpointError, match="rest of it"):
        compare_sources(
            "it", ("a", "x" * 300), ("b", "x" * 300 + "rest of it"), remedy="remove one"
        )


def test_an_excerpt_of_a_long_value_is_short() -> None:
    assert excerpt("short") == "'short'"
    assert len(excerpt("x" * 70_000)) < 100


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
    assert make_plain(value) is value
    array = {"a": np.zeros(2)}
    assert make_plain(array) is array


def test_an_argument_that_no_other_process_could_get_is_named() -> None:
    env = EnvSpec(id="a/b-v0", kwargs={"size": {"low": [0, np.zeros(3)]}})
    expected = r"the EnvSpec of a/b-v0.kwargs\['size'\]\['low'\]\[1\] is array\(\[0., 0., 0.\]\), a ndarray"
    with pytest.raises(ConfigError, match=expected):
        prepare_hook([env])
    with pytest.raises(ConfigError, match=r"config\['a'\] is <object object"):
        require_plain({"a": object()}, "config")
    assert find_part_without_json({"a": [1, None]}, "config") is None


PACKAGE = Path(__file__).parents[2] / "vla_rl"
NAMES = ("open [the] box", "ends [/b] a style", "a :smile: in a folder", "[link=x]")


def test_brackets_and_colons_of_names_stay_in_tables_and_their_titles() -> None:
    console = plain_console(file=io.StringIO(), width=100)
    for name in NAMES:
        table = Table("task", title=name)
        table.add_row(name)
        console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert [printed.count(name) for name in NAMES] == [2, 2, 2, 2]


def test_a_run_whose_task_holds_an_end_of_markup_prints_its_summary() -> None:
    console = plain_console(file=io.StringIO(), width=100)
    console.print(_task_table({NAMES[1]: TaskTally(num_episodes=1)}))
    assert NAMES[1] in console.file.getvalue()  # type: ignore[attr-defined]


def test_every_console_of_the_package_is_a_plain_one() -> None:
    makers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "Console" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Console"
    }
    assert makers == {"util/values.py"}
