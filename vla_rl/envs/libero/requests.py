"""Requests of two or three skills in the scene of libero_goal, in words that have to be resolved.

    put the black dish on the plate, and then open the drawer between the other two
        in_order: on akita_black_bowl_1 plate_1, open wooden_cabinet_1_middle_region

A request names things by their properties, by what they are not, as the other one of two; it says what comes
first, and what must stay as it is. Its goals are predicates, which the simulator evaluates
(`vla_rl.envs.libero.request_env`). Some wordings and some combinations of skills are kept for the held-out
splits alone:

    train          wordings and combinations that are trained on
    wordings       other words for the same combinations
    combinations   the same words for other combinations
"""

import itertools
import random
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from vla_rl.types import derive_seed

Split: TypeAlias = Literal["train", "wordings", "combinations"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request in words, and what fulfils it.

    Example:
        Request(request="turn on the stove, but first open the drawer in the middle", in_order=True,
                goals=("open wooden_cabinet_1_middle_region", "turnon flat_stove_1"))
    """

    request: str
    goals: tuple[str, ...]
    """Predicates, as `LiberoRequestEnv` takes them."""

    forbidden: tuple[str, ...] = ()
    """Predicates that must not hold."""

    in_order: bool = False
    """The goals have to come true one after the other."""

    task: str = "request"
    """Name under which results are reported."""


class Skill(msgspec.Struct, frozen=True):
    """One task of libero_goal as a part of requests."""

    goal: str
    moves: tuple[str, ...]
    """Things that it moves or fills; two skills of one request share none."""

    wordings: tuple[str, ...]
    """Words for it; the last ones are held out."""

    others_words: tuple[str, ...] = ()
    """Words that resolve it by the other one of two, or by what it is not; the last one is held out."""


BOWL, BOTTLE, CHEESE, PLATE = "akita_black_bowl_1", "wine_bottle_1", "cream_cheese_1", "plate_1"
TOP_DRAWER, MIDDLE_DRAWER = "wooden_cabinet_1_top_region", "wooden_cabinet_1_middle_region"
CABINET_TOP, STOVE = "wooden_cabinet_1_top_side", "flat_stove_1"

# fmt: off
SKILLS: Final = (
    Skill(f"open {MIDDLE_DRAWER}", ("drawers",),
          ("open the middle drawer of the cabinet", "open the second drawer",
           "pull out the drawer in the middle"),
          ("open the drawer that is neither the top nor the bottom one", "open the drawer between the other two")),
    Skill(f"on {BOWL} {STOVE}_cook_region", ("bowl", "burner"),
          ("put the bowl on the stove", "put the black dish on the stove",
           "move the round black thing onto the burner"),
          ("one of the two dishes is the plate, so put the other one on the stove",
           "put the dish that is not the plate on the stove")),
    Skill(f"on {BOTTLE} {CABINET_TOP}", ("bottle", "cabinet top"),
          ("put the wine bottle on top of the cabinet", "put the drink on the cabinet",
           "stand the tall thing on top of the cabinet"),
          ("put the bottle on the piece of furniture that is not the rack",
           "the bottle does not go on the rack but on the cabinet")),
    Skill(f"on {BOWL} {CABINET_TOP}", ("bowl", "cabinet top"),
          ("put the bowl on top of the cabinet", "put the black dish on the cabinet",
           "move the round black thing onto the cabinet"),
          ("one of the two dishes is the plate, so put the other one on top of the cabinet",
           "put the dish that is not the plate on top of the cabinet")),
    Skill(f"on {PLATE} main_table_stove_front_region", ("plate",),
          ("push the plate to the front of the stove", "push the flat dish before the stove",
           "slide the plate until it is in front of the stove"),
          ("push the dish that is not the bowl to the front of the stove",
           "one of the two dishes is the bowl, so push the other one before the stove")),
    Skill(f"on {CHEESE} {BOWL}", ("cheese", "bowl"),
          ("put the cream cheese in the bowl", "put the food in the bowl",
           "drop the small box into the black dish"),
          ("put the cheese in the dish that is not the plate", "the cheese goes into the dish, but not on the plate")),
    Skill(f"turnon {STOVE}", ("knob",),
          ("turn on the stove", "switch the stove on", "light the burner"),
          ("do not leave the stove off", "the stove must not stay off")),
    Skill(f"on {BOWL} {PLATE}", ("bowl", "plate"),
          ("put the bowl on the plate", "put the black dish on the white one",
           "set the round black thing on the plate"),
          ("put one dish on the other", "of the two dishes, put the black one on the other")),
    Skill(f"on {BOTTLE} wine_rack_1_top_region", ("bottle",),
          ("put the wine bottle on the rack", "put the drink on the rack", "lay the tall thing on the rack"),
          ("the bottle does not go on the cabinet but on the rack",
           "put the bottle on the piece of furniture that is not the cabinet")),
    Skill(f"in {BOWL} {TOP_DRAWER}", ("bowl", "drawers"),
          ("open the top drawer and put the bowl inside", "put the black dish into the top drawer",
           "put the round black thing away in the uppermost drawer"),
          ("put the dish that is not the plate into the top drawer",
           "one of the two dishes is the plate, so put the other one into the top drawer")),
)
"""The tasks of libero_goal, with the words of a request for each."""
# fmt: on

SPARED: Final = (
    (f"turnon {STOVE}", "knob", ("but leave the stove off", "and do not turn the stove on")),
    (f"open {MIDDLE_DRAWER}", "drawers", ("but keep the middle drawer shut", "and leave the second drawer closed")),
)  # fmt: skip
"""Predicates that a request may forbid, what each concerns, and words; the last ones are held out."""

JOINED: Final = ("{} and {}", "{}, and also {}", "please do two things: {}; {}")
ORDERED: Final = ("{}, and then {}", "first {}, after that {}", "{}; once this is done, {}")
REVERSED: Final = (
    "{1}, but before that {0}",
    "before you {1}, {0}",
    "{1}; do this last, though: first {0}",
)
"""Ways to join two parts; the last of each is held out."""

ALSO: Final = ("{}, and {}", "{}, and also {}", "{}; also {}")
LATER: Final = ("{}, and then {}", "{}, after that {}", "{}; once this is done, {}")
"""Ways to add a third part; the last of each is held out."""

HELD_OUT_SHARE: Final = 4
"""One in this number of combinations of skills is held out."""


def list_combinations(*, held_out: bool) -> list[tuple[Skill, ...]]:
    """Return the sets of two or three skills that do not get in each other's way."""
    found = []
    for skills in (*itertools.combinations(SKILLS, 2), *itertools.combinations(SKILLS, 3)):
        moved = [thing for skill in skills for thing in skill.moves]
        # By the goals, so that the split of a combination does not depend on the others.
        number = derive_seed(0, "combination", *(skill.goal for skill in skills))
        if len(set(moved)) == len(moved) and (number % HELD_OUT_SHARE == 0) == held_out:
            found.append(skills)
    return found


def draw_requests(split: Split, num: int, seed: int = 0) -> list[Request]:
    """Draw requests; the same arguments give the same ones.

    Args:
        split: which wordings and combinations they are made of.
        num: number of requests; some words may repeat.
        seed: seed of the draws.
    """
    dice = random.Random(derive_seed(seed, "requests", split))
    combinations = list_combinations(held_out=split == "combinations")
    return [_draw_request(dice, dice.choice(combinations), split) for _ in range(num)]


def _draw_request(dice: random.Random, skills: Sequence[Skill], split: Split) -> Request:
    ordered = dice.sample(skills, len(skills))
    parts = [
        _draw_words(
            dice, skill.others_words if dice.random() < 0.4 else skill.wordings, split == "wordings"
        )
        for skill in ordered
    ]
    is_held_out = split == "wordings"
    # Only two parts can be told in reverse and still be read in one way.
    ways = (JOINED, ORDERED, REVERSED) if len(parts) == 2 else (JOINED, ORDERED)
    chosen = dice.choice(ways)
    in_order = chosen is not JOINED
    words = _draw_words(dice, chosen, is_held_out).format(*parts[:2])
    for part in parts[2:]:
        words = _draw_words(dice, LATER if in_order else ALSO, is_held_out).format(words, part)
    moved = {thing for skill in skills for thing in skill.moves}
    spared = [each for each in SPARED if each[1] not in moved]
    forbidden: tuple[str, ...] = ()
    if spared and dice.random() < 0.25:
        predicate, _, ways_to_spare = dice.choice(spared)
        forbidden = (predicate,)
        words = f"{words}, {_draw_words(dice, ways_to_spare, is_held_out)}"
    return Request(
        request=words,
        goals=tuple(skill.goal for skill in ordered),
        forbidden=forbidden,
        in_order=in_order,
        task=f"{split}/{len(skills)} skills",
    )


def _draw_words(dice: random.Random, ways: Sequence[str], held_out: bool) -> str:
    """Return one of the words that are trained on, or the held-out ones."""
    return ways[-1] if held_out else dice.choice(ways[:-1])
