"""Questions about images that are drawn here, with exact answers.

user       (image) Is the square on the left or on the right?
assistant  left

The images need neither a simulator nor a window: squares are painted with NumPy, and the view of a
driver by the driving world's own painter. Frames of other simulators, whose renderers do not belong
into a process that trains, come as files (`text/question` with `image_field`).
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.text.task import Ask, Done, TextLimits, TextTask
from vla_rl.types import ChoiceFormat, Info, Message, ReplyOptions, derive_seed
from vla_rl.util.imports import check_choice

COLOURS: Final = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 240),
    "white": (245, 245, 245),
}

SIDES: Final = ("left", "right")

NUMBERS: Final = ("one", "two", "three", "four")

GROUND: Final = 24
"""Brightness around squares."""

LIGHTS: Final = {"red": (235, 30, 30), "green": (40, 220, 70)}
"""Colours in which the driving world paints a traffic light."""

SEEN_PIXELS: Final = 8
"""Pixels of a light from which on it counts as seen; others hide it, or it is too far away."""

DRIVERS_VIEW: Final = (0.35, 0.75)
"""Part of the height of a camera's image that is shown, in which the road lies."""


class Drawn(NamedTuple):
    """An image and the right word about it.

    Example:
        Drawn(image=np.zeros((56, 56, 3), np.uint8), answer="left")
    """

    image: np.ndarray
    answer: str


class Scene(NamedTuple):
    """One kind of question.

    Example:
        Scene("Is the square on the left or on the right?", ("left", "right"), draw_side)
    """

    asked: str
    words: tuple[str, ...]
    """Possible answers."""

    draw: Callable[[int, int], Drawn]
    """Function of the seed and the height and width in pixels."""

    least_size: int = 8
    """Smallest height and width in pixels."""


class SceneTask(TextTask):
    """One image a turn, each with the same question, answered by one word.

    Reward: the share of the images, for each right word. Success is to have all of them right.

    Args:
        question: a name of `SCENES`: the "side" or "colour" of a square, the "count" of squares, or
            the "light" that a driver sees.
        size: height and width of the images in pixels, >= 8; >= 56 for "light".
        is_guided: whether sampling is restricted to the possible words.
        num_images: turns, with another image in each.
    """

    def __init__(
        self, question: str = "side", size: int = 56, is_guided: bool = True, num_images: int = 1
    ) -> None:
        check_choice(SCENES, question, "question")
        self._scene = SCENES[question]
        if size < self._scene.least_size:
            raise ValueError(
                f"size={size}: expected an image of at least {self._scene.least_size} pixels"
            )
        if num_images < 1:
            raise ValueError(f"num_images={num_images}: expected at least one image")
        self.limits = TextLimits(max_turns=num_images)
        self._size, self._is_guided, self._num_images = size, is_guided, num_images
        self._verdicts: list[bool] = []

    async def setup(self, seed: int, options: Info) -> Ask:
        """Show the image of a seed."""
        self._seed = seed
        return self._show()

    async def reply(self, text: str) -> Ask | Done:
        """Check the word, and show the next image."""
        self._verdicts.append(text.strip().lower() == self._answer)
        reward = self._verdicts[-1] / self._num_images
        info = {"answer": self._answer}
        if len(self._verdicts) == self._num_images:
            return Done(reward, all(self._verdicts), info=info)
        return self._show(reward, info)

    def _show(self, reward: float = 0.0, info: Info | None = None) -> Ask:
        number = len(self._verdicts)
        seed = derive_seed(self._seed, "image", number) % 2**31 if number else self._seed
        image, self._answer = self._scene.draw(seed, self._size)
        words = ChoiceFormat(choices=self._scene.words) if self._is_guided else None
        asked = Message(role="user", images=(image,), content=self._scene.asked)
        return Ask((asked,), reward=reward, info=info or {}, options=ReplyOptions(format=words))


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


def draw_squares(seed: int, size: int) -> Drawn:
    """Draw one to four squares of any colours, each in a quarter of its own."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, len(NUMBERS) + 1))
    image = np.full((size, size, 3), GROUND, np.uint8)
    half, edge = size // 2, size // 4
    for quarter in rng.permutation(4)[:number]:
        # a pixel of ground before each, so that no two squares touch
        row, column = rng.integers(1, half - edge + 1, 2) + half * np.array(divmod(int(quarter), 2))
        colour = COLOURS[str(rng.choice(list(COLOURS)))]
        image[row : row + edge, column : column + edge] = colour
    return Drawn(image, NUMBERS[number - 1])


def draw_light(seed: int, size: int) -> Drawn:
    """Draw the view of a driver in the first scene, drawn by the seed, in which a light of the colour
    that the seed draws is seen.
    """
    # Imported here: the driving world is loaded for its own question alone.
    from vla_rl.envs.driving.observing import FRONT, Observer, make_car
    from vla_rl.envs.driving.world import NUM_SCENES, draw_world

    rng = np.random.default_rng(seed)
    # Drawn first: most lights of the world are red, and one word would be right most of the time.
    answer = str(rng.choice(list(LIGHTS)))
    while True:
        world = draw_world(int(rng.integers(NUM_SCENES)))
        if world.roads.stop is None or world.signal.is_red(0.0) != (answer == "red"):
            continue
        observer = Observer(world, (FRONT,), size, DRIVERS_VIEW)
        image = observer.look(make_car(world.start), world.tracks.poses[:, 0], 0.0)["image"]
        # what hides the light, or is far away, would make a question without an answer
        if (image == LIGHTS[answer]).all(axis=2).sum() >= SEEN_PIXELS:
            return Drawn(image, answer)


def _draw_side(seed: int, size: int) -> Drawn:
    image, _, side = draw_square(seed, size)
    return Drawn(image, side)


def _draw_colour(seed: int, size: int) -> Drawn:
    image, colour, _ = draw_square(seed, size)
    return Drawn(image, colour)


SCENES: Final = {
    "side": Scene("Is the square on the left or on the right?", SIDES, _draw_side),
    "colour": Scene(
        f"Which colour has the square: {', '.join(COLOURS)}?", tuple(COLOURS), _draw_colour
    ),
    "count": Scene(f"How many squares are there: {', '.join(NUMBERS)}?", NUMBERS, draw_squares),
    "light": Scene("Is the traffic light red or green?", tuple(LIGHTS), draw_light, least_size=56),
}
"""Questions by name."""
