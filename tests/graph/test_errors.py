"""The hint that errors of a graph end with."""

import pytest

from vla_rl.graph.node import suggest


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("rewrad", ["reward", "update"], "; did you mean 'reward'?"),
        ("zzz", ["reward", "update"], "; known: 'reward', 'update'"),
        (
            "zzz",
            [f"n{number}" for number in range(12)],
            "; known: 'n0', 'n1', 'n2', 'n3', 'n4', 'n5', 'n6', 'n7', 'n8', 'n9', 'n10', 'n11'",
        ),
        ("zzz", [f"n{number}" for number in range(13)], ""),
        ("zzz", [], ""),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_or_with_up_to_twelve_known_ones(
    name: str, known: list[str], hint: str
) -> None:
    assert suggest(name, known) == hint
