"""A question about an image: a square on a dark ground, its colour or its side.

user       (image) Is the square on the left or on the right?
assistant  left
"""

from typing import Final, Literal

import numpy as np

from vla_rl.envs.text.limits import TextLimits
from vla_rl.envs.text.task import Ask, Done, TextTask
from vla_rl.types import ChoiceFormat, Info, Message, ReplyOptions

COLOURS: Final = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 240),
    "white": (245, 245, 245),
}

SIDES: Final = ("left", "right")

QUESTIONS: Final = {
    "side": "Is the square on the left or on the right?",
    "colour": f"Which colour has the square: {', '.join(COLOURS)}?",
}

GROUND: Final = 24
"""Brightness around the square."""


class SquareTask(TextTask):
    """One image, one question, one word. Reward: 1 for the right word, 0 otherwise.

    Args:
        question: ask for the "side" or the "colour".
        size: height and width of the image in pixels, >= 8.
        is_guided: whether sampling is restricted to the possible words.
    """

    limits = TextLimits(max_turns=1)

    def __init__(
        self, question: Literal["side", "colour"] = "side", size: int = 56, is_guided: bool = True
    ) -> None:
        if size < 8:
            raise ValueError(f"size={size}: expected an image of at least 8 pixels")
        self._question, self._size, self._is_guided = question, size, is_guided

    async def setup(self, seed: int, options: Info) -> Ask:
        """Show the image of a seed."""
        image, colour, side = draw_square(seed, self._size)
        words = SIDES if self._question == "side" else tuple(COLOURS)
        self._answer = side if self._question == "side" else colour
        rules = ReplyOptions(format=ChoiceFormat(choices=words) if self._is_guided else None)
        asked = Message(role="user", images=(image,), content=QUESTIONS[self._question])
        return Ask((asked,), options=rules)

    async def reply(self, text: str) -> Done:
        """Check the word."""
        is_right = text.strip().lower() == self._answer
        return Done(float(is_right), is_right, info={"answer": self._answer})


def draw_square(seed: int, size: int) -> tuple[np.ndarray, str, str]:
    """Return the image of a seed, uint8 [size, size, 3], and the colour and side of its square."""
    rng = np.random.default_rng(seed)
    colour, side = str(rng.choice(list(COLOURS))), str(rng.choice(SIDES))
    edge = size // 4
    row = rng.integers(0, size - edge + 1)
    column = rng.integers(0, size // 2 - edge + 1) + (size // 2 if side == "right" else 0)
    image = np.full((size, size, 3), GROUND, np.uint8)
    image[row : row + edge, column : column + edge] = COLOURS[colour]
    return image, colour, side
