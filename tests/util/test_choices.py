"""A function is chosen by its name or as `module:function`; what is unknown has its nearest match."""

import pytest

from vla_rl.errors import ConfigError
from vla_rl.util.choices import check_choice, chosen, is_function_path, load_function


def test_a_known_name_gives_its_entry() -> None:
    assert chosen({"ppo": 1, "gspo": 2}, "gspo", "loss") == 2


def test_an_unknown_name_is_refused_with_the_nearest_and_all_others() -> None:
    with pytest.raises(
        ConfigError, match=r"loss 'pppo' is unknown; did you mean 'ppo'\? known are: gspo, ppo\."
    ):
        check_choice({"ppo", "gspo"}, "pppo", "loss")
    with pytest.raises(ConfigError, match=r"loss 'xyz' is unknown; known are: gspo, ppo\."):
        check_choice({"ppo", "gspo"}, "xyz", "loss")


def test_a_path_has_a_colon() -> None:
    assert is_function_path("my_rl:my_loss")
    assert not is_function_path("my_rl.my_loss")


def test_a_path_gives_the_function_itself() -> None:
    assert load_function("vla_rl.util.choices:load_function", "loss") is load_function


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "loss .*: module 'no_such_module' cannot be found; is it on the path"),
        (
            "vla_rl.util.choices:load_functions",
            "has no function 'load_functions'; did you mean 'load_function'",
        ),
        ("vla_rl.util.choices:T", "has no function 'T'"),  # there, and no function
        ("vla_rl.util.choices:", "has no function ''"),
    ],
)
def test_a_path_to_no_function_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(path, "loss")
