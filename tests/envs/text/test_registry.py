"""Text environments by id or by `module:Class`, with their arguments checked."""

from typing import Any

import pytest

import vla_rl.envs.text  # noqa: F401 - registers its tasks
from vla_rl.envs.text.task import find_text_task, make_text_task, text_task_ids
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec


def test_an_id_and_the_path_of_its_class_give_the_same_class() -> None:
    for task_id in text_task_ids():
        found = find_text_task(task_id)
        assert find_text_task(f"{found.__module__}:{found.__name__}") is found


@pytest.mark.parametrize(
    ("task_id", "said"),
    [
        ("text/arithmetik", "is unknown; did you mean 'text/arithmetic'"),
        ("nowhere:Task", "module 'nowhere' cannot be found; is it on the path?"),
        (":Task", "names no module before the colon"),
        (
            "vla_rl.envs.text.task:TextTasc",
            r"has no TextTask 'TextTasc'; did you mean 'TextTask'\?",
        ),
        ("vla_rl.types:EnvSpec", "has no TextTask 'EnvSpec'"),
    ],
)
def test_what_is_no_text_environment_is_named_with_the_nearest(task_id: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_text_task(task_id)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [({"colour": "red"}, "takes no 'colour'"), ({"num_digits": "x"}, "'num_digits' of .* is 'x'")],
)
def test_an_argument_that_does_not_fit_is_named(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_text_task(EnvSpec(id="text/arithmetic", kwargs=kwargs))
