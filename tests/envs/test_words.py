"""Instructions in the memory that gymnasium's vector environments share."""

import copy
import string

from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from vla_rl.envs.gymnasium_adapters import Words

SPACE = Words(32, charset=string.ascii_lowercase + " ")


def test_instructions_are_read_whenever_they_are_asked_for() -> None:
    memory = create_shared_memory(SPACE, n=2)
    seen = read_from_shared_memory(SPACE, memory, n=2)
    write_to_shared_memory(SPACE, 0, "open the drawer", memory)
    write_to_shared_memory(SPACE, 1, "close it", memory)
    assert (seen[0], seen[1], seen[:], len(seen)) == (
        "open the drawer", "close it", ("open the drawer", "close it"), 2,
    )  # fmt: skip
    write_to_shared_memory(SPACE, 1, "close the box", memory)
    assert seen[1] == "close the box"


def test_a_copy_keeps_the_instructions_of_its_moment() -> None:
    memory = create_shared_memory(SPACE, n=1)
    write_to_shared_memory(SPACE, 0, "open the drawer", memory)
    kept = copy.deepcopy(read_from_shared_memory(SPACE, memory, n=1))
    write_to_shared_memory(SPACE, 0, "close it", memory)
    assert kept == ("open the drawer",)
