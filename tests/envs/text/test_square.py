"""Questions about squares: an image, the possible words, and one that is right."""

import pytest
from text_episodes import ask_tool, say, spec_of

from vla_rl.envs.text import Ask, Done, TextEnvPool, TextTask, make_text_task
from vla_rl.envs.text.tasks.questions import COLOURS, draw_square
from vla_rl.errors import ConfigError
from vla_rl.types import ChoiceFormat, EnvSpec, Info, RegexFormat, ReplyOptions


@pytest.mark.parametrize("question", ["side", "colour"])
async def test_only_the_word_that_describes_the_image_earns_1(question: str) -> None:
    image, colour, side = draw_square(3, 40)
    right = side if question == "side" else colour
    spec = spec_of("text/square", seed=3, question=question, size=40)
    async with TextEnvPool() as pool:
        for word in ("left", "right", *COLOURS):
            async with pool.lease(spec) as env:
                start = await env.reset()
                (shown,) = start.messages[0].images
                assert (shown == image).all()
                assert isinstance(start.options.format, ChoiceFormat)
                assert right in start.options.format.choices
                outcome = await env.step(say(f" {word.title()}"))
                assert (outcome.reward, outcome.terminated) == (float(word == right), True)


class Counted(TextTask):
    """Asks twice, each time with another rule."""

    async def setup(self, seed: int, options: Info) -> Ask:
        return Ask("a?", options=ReplyOptions(format=RegexFormat(pattern="a")))

    async def reply(self, text: str) -> Ask | Done:
        return Ask("b?") if text == "a" else Done(1.0, is_success=True)


async def test_rules_of_a_question_are_for_its_reply_alone_and_hold_after_tools() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(f"{__name__}:Counted")) as env:
        start = await env.reset()
        assert start.options.format == RegexFormat(pattern="a")
        called = await env.step(ask_tool(errors=("a tool call is not JSON",)))
        assert called.options == start.options
        assert (await env.step(say("a"))).options.format is None


def test_an_image_too_small_for_a_square_is_refused() -> None:
    with pytest.raises(ConfigError, match="size=4: expected an image of at least 8 pixels"):
        make_text_task(EnvSpec(id="text/square", kwargs={"size": 4}))
