"""Questions about images that are drawn here: exact answers, balanced, the same for a seed."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from sample_tasks import say, spec_of

from vla_rl.envs.text import TextEnvPool, make_text_task
from vla_rl.envs.text.scenes import COLOURS, GROUND, LIGHTS, SCENES, SEEN_PIXELS, draw_square
from vla_rl.errors import ConfigError
from vla_rl.types import ChoiceFormat, EnvSpec

SIZES = {"side": 40, "colour": 40, "count": 40, "light": 84}


@pytest.mark.parametrize("question", SCENES)
async def test_only_the_word_that_describes_the_image_earns_1(question: str) -> None:
    size = SIZES[question]
    image, right = SCENES[question].draw(3, size)
    spec = spec_of("text/square", seed=3, question=question, size=size)
    async with TextEnvPool() as pool:
        for word in SCENES[question].words:
            async with pool.lease(spec) as env:
                start = await env.reset()
                (shown,) = start.messages[0].images
                assert (shown == image).all()
                assert isinstance(start.options.format, ChoiceFormat)
                assert start.options.format.choices == SCENES[question].words
                outcome = await env.step(say(f" {word.title()}"))
                assert (outcome.reward, outcome.terminated) == (float(word == right), True)
                assert outcome.info["is_success"] == (word == right)


def test_the_answers_are_what_the_pixels_show() -> None:
    for seed in range(40):
        image, colour, side = draw_square(seed, 40)
        assert SCENES["side"].draw(seed, 40).answer == side
        assert SCENES["colour"].draw(seed, 40).answer == colour
        pixels = np.argwhere((image == COLOURS[colour]).all(axis=2))
        assert len(pixels) == 100
        assert side == ("left" if pixels[:, 1].max() < 20 else "right")
        image, number = SCENES["count"].draw(seed, 40)
        # squares do not touch, so each has 10 x 10 pixels of its own
        assert (image != GROUND).any(axis=2).sum() == 100 * (
            SCENES["count"].words.index(number) + 1
        )
    for seed in range(8):
        image, answer = SCENES["light"].draw(seed, 84)
        seen = {name: (image == paint).all(axis=2).sum() for name, paint in LIGHTS.items()}
        assert seen[answer] >= SEEN_PIXELS
        assert sum(seen.values()) == seen[answer]


@pytest.mark.parametrize("question", SCENES)
def test_no_word_is_right_most_of_the_time(question: str) -> None:
    num = 24 if question == "light" else 400
    answers = Counter(SCENES[question].draw(seed, SIZES[question]).answer for seed in range(num))
    assert set(answers) == set(SCENES[question].words)
    assert max(answers.values()) <= num / len(answers) * 1.5


async def test_each_turn_shows_another_image_and_earns_its_share() -> None:
    spec = spec_of("text/square", seed=5, question="count", size=40, num_images=3)
    async with TextEnvPool() as pool, pool.lease(spec) as env:
        start = await env.reset()
        shown = [start.messages[0].images[0]]
        for turn in range(3):
            num_squares = int((shown[-1] != GROUND).any(axis=2).sum()) // 100
            right = SCENES["count"].words[num_squares - 1]
            outcome = await env.step(say("no idea" if turn == 1 else right))
            assert outcome.reward == pytest.approx(0.0 if turn == 1 else 1 / 3)
            assert outcome.info["answer"] == right
            assert outcome.terminated == (turn == 2)
            if turn < 2:
                shown.append(outcome.messages[0].images[0])
        assert not outcome.info["is_success"]
    assert not (shown[0] == shown[1]).all()
    assert not (shown[1] == shown[2]).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 4}, "size=4: expected an image of at least 8 pixels"),
        ({"question": "light", "size": 40}, "size=40: expected an image of at least 56 pixels"),
        ({"num_images": 0}, "num_images=0: expected at least one image"),
        ({"question": "colours"}, "question 'colours' is unknown; did you mean 'colour'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_text_task(EnvSpec(id="text/square", kwargs=kwargs))


def test_drawing_starts_no_simulator_and_loads_no_network() -> None:
    program = (
        "import sys; from vla_rl.envs.text.scenes import SCENES; "
        "[scene.draw(0, 84) for scene in SCENES.values()]; "
        "print([name for name in ('torch', 'mujoco', 'OpenGL', 'robosuite') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"
