"""Copies of pictures on the shelves of other hosts, kept from one mini-batch to the next.

    lend ─► held: the copies that are there ─┐
       └──► the others are borrowed ─► add ──┴─► ranks read ─► end: what has no room is freed

An update reads most pictures several times: in each epoch, for a reference, for a critic. Pure: no
process is asked.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vla_rl.types import Shelved, ShelvedArray


@dataclass
class _Memory:
    """Copies that were borrowed together."""

    copies: dict[ShelvedArray, ShelvedArray]
    """The copy of each original."""

    num_readers: int = 1
    is_stale: bool = False
    """Whether an original was dropped, after the update that reads it."""

    @property
    def num_bytes(self) -> int:
        return sum(original.num_bytes for original in self.copies)

    def is_of(self, shelved: Shelved) -> bool:
        episode = shelved.host, shelved.key
        return any((original.host, original.key) == episode for original in self.copies)


@dataclass
class _Shelf:
    """The copies on the shelf of one host."""

    memories: dict[int, _Memory] = field(default_factory=dict)
    """Memories by key, in the order of their last use."""

    key_of: dict[ShelvedArray, int] = field(default_factory=dict)
    """Key of the memory with the copy of an original."""


class PictureLoans:
    """Knows the copies on every shelf, and who reads them."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}

    def held(
        self, host: str, pictures: Collection[ShelvedArray]
    ) -> tuple[list[int], dict[ShelvedArray, ShelvedArray]]:
        """Return the copies that are on the shelf of `host`, and the keys of their memories.

        They stay until `end` is called with these keys.
        """
        shelf = self._shelves.setdefault(host, _Shelf())
        found = {each: shelf.key_of[each] for each in pictures if each in shelf.key_of}
        keys = list(dict.fromkeys(found.values()))
        for key in keys:
            shelf.memories[key].num_readers += 1
        return keys, {each: shelf.memories[key].copies[each] for each, key in found.items()}

    def add(self, host: str, key: int, copies: Mapping[ShelvedArray, ShelvedArray]) -> None:
        """Add a memory that was borrowed, and is read until `end` is called with its key."""
        shelf = self._shelves.setdefault(host, _Shelf())
        shelf.memories[key] = _Memory(dict(copies))
        shelf.key_of |= dict.fromkeys(copies, key)

    def end(self, host: str, keys: Collection[int], room: int) -> list[int]:
        """Note that a mini-batch was computed; return the keys of memories to free.

        Args:
            host: where it was.
            keys: memories that it read.
            room: bytes that copies may take which nothing reads at the moment.
        """
        shelf = self._shelves[host]
        for key in keys:
            memory = shelf.memories.pop(key)
            memory.num_readers -= 1
            shelf.memories[key] = memory
        unread = {key: each for key, each in shelf.memories.items() if each.num_readers == 0}
        kept = sum(memory.num_bytes for memory in unread.values())
        freed = []
        # the stale ones first, then those that were not read for longest
        for key, memory in sorted(unread.items(), key=lambda each: not each[1].is_stale):
            if not memory.is_stale and kept <= room:
                break
            kept -= memory.num_bytes
            freed.append(key)
            del shelf.memories[key]
            for original in memory.copies:
                if shelf.key_of.get(original) == key:
                    del shelf.key_of[original]
        return freed

    def drop(self, shelved: Shelved) -> None:
        """Let the copies of an episode's pictures be freed, whose originals are dropped."""
        for shelf in self._shelves.values():
            for memory in shelf.memories.values():
                memory.is_stale = memory.is_stale or memory.is_of(shelved)
