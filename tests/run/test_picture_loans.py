"""Copies of pictures stay on a shelf between mini-batches, as far as there is room."""

from vla_rl.remote_rollout.image_routes import ImageCopies
from vla_rl.types import Shelved, ShelvedArray

NUM_BYTES = 4 * 4 * 3


def picture(episode: int, number: int = 0, host: str = "home") -> ShelvedArray:
    return ShelvedArray(host, f"memory of {episode}", episode, number * NUM_BYTES, "|u1", (4, 4, 3))


def borrowed(
    loans: ImageCopies, key: int, *originals: ShelvedArray
) -> dict[ShelvedArray, ShelvedArray]:
    """Add a memory on the shelf of `beside` that has copies of these."""
    copies = {each: picture(key, number, "beside") for number, each in enumerate(originals)}
    loans.add("beside", key, copies)
    return copies


def test_a_copy_that_is_there_is_found_on_its_host_alone() -> None:
    loans = ImageCopies()
    copies = borrowed(loans, 1, picture(7), picture(8))
    assert loans.end("beside", [1], room=1000) == []
    assert loans.held("beside", [picture(8), picture(9)]) == ([1], {picture(8): copies[picture(8)]})
    assert loans.held("elsewhere", [picture(8)]) == ([], {})


def test_copies_that_were_not_read_for_longest_make_room() -> None:
    loans = ImageCopies()
    for key in (1, 2, 3):
        borrowed(loans, key, picture(key))
    assert loans.end("beside", [1, 2, 3], room=3 * NUM_BYTES) == []
    keys, _ = loans.held("beside", [picture(1)])
    assert loans.end("beside", keys, room=2 * NUM_BYTES) == [2]
    assert loans.held("beside", [picture(2)]) == ([], {})
    assert loans.held("beside", [picture(3)])[0] == [3]


def test_copies_that_are_read_are_not_freed_and_take_none_of_the_room() -> None:
    loans = ImageCopies()
    borrowed(loans, 1, picture(7))
    borrowed(loans, 2, picture(8))
    keys, _ = loans.held("beside", [picture(7)])
    assert loans.end("beside", [1, 2], room=NUM_BYTES) == []
    assert loans.end("beside", keys, room=NUM_BYTES) == [2]


def test_copies_of_an_episode_that_is_dropped_are_freed_whatever_room_there_is() -> None:
    loans = ImageCopies()
    borrowed(loans, 1, picture(7), picture(8))
    borrowed(loans, 2, picture(9))
    assert loans.end("beside", [1], room=1000) == []
    loans.drop(Shelved(host="home", key=8, num_bytes=NUM_BYTES))
    loans.drop(Shelved(host="another", key=9, num_bytes=NUM_BYTES))
    assert loans.end("beside", [2], room=1000) == [1]


def test_two_copies_of_a_picture_are_freed_one_by_one() -> None:
    # two ranks may have asked for it at the same time
    loans = ImageCopies()
    borrowed(loans, 1, picture(7))
    later = borrowed(loans, 2, picture(7))
    assert loans.end("beside", [1, 2], room=NUM_BYTES) == [1]
    assert loans.held("beside", [picture(7)]) == ([2], later)
