"""Questions that are drawn here have exact answers: two-digit sums, words about images.

What counts as an answer, what is held out or balanced, the same for a seed; a run of sums with two
updates.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_tasks import ask_tool, say, spec_of

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.envs.text import TextEnvPool, make_text_task
from vla_rl.envs.text.arithmetic import calculate
from vla_rl.envs.text.scenes import COLOURS, GROUND, LIGHTS, SCENES, SEEN_PIXELS, draw_square
from vla_rl.envs.text.sums import read_answer, split_sums
from vla_rl.errors import ConfigError, EnvError
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.recipes.grpo_sums import ENV_ID, GrpoSumsConfig, main
from vla_rl.reporting import read_metrics
from vla_rl.types import ChoiceFormat, EnvSpec, Message

SIZES = {"side": 40, "colour": 40, "count": 40, "light": 84}

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


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


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("81", "81"),
        (" The answer is 81. ", "81"),
        ("58 + 23 = 81", "81"),
        ("58+23=81", "81"),
        ("58 + 23 = -81", "-81"),
        ("", None),
        ("eighty-one", None),
        ("80 81 82", None),  # a reply that lists numbers cannot win
        ("58 + 23 = 80 or 81", None),
        ("58 + 23 = 81, 58 + 23 = 81", None),
        ("58 + 24 = 81", None),  # another sum is repeated
        ("158 + 23 = 81", None),
        ("81.0", None),
    ],
)
def test_one_number_is_an_answer_beside_the_sum_itself(reply: str, answer: str | None) -> None:
    assert read_answer(reply, "58 + 23") == answer


async def run_episode(*replies: Message, problem: str = "58 - 23", **kwargs: Any) -> Any:
    """Return the environment's last answer to a conversation."""
    async with TextEnvPool() as pool:
        episode = spec_of(ENV_ID, options={"problem": problem}, **kwargs)
        async with pool.lease(episode) as env:
            answer: Any = await env.reset()
            for reply in replies:
                answer = await env.step(reply)
    return answer


@pytest.mark.parametrize(
    ("scorer", "reply", "reward", "is_success"),
    [
        ("exact", "58 - 23 = 35", 1.0, True),
        ("exact", "58 - 23 = 36", 0.0, False),
        ("exact", "34 35 36", 0.0, False),
        ("digits", "58 - 23 = 35", 1.0, True),
        ("digits", "58 - 23 = 36", 0.5, False),
        ("digits", "58 - 23 = 135", 2 / 3, False),  # a surplus digit is a wrong one
        ("digits", "58 - 23 = -35", 2 / 3, False),
        ("digits", "34 35 36", 0.0, False),
        ("form", "58 - 23 = 36", 1.0, False),
        ("form", "58 - 23 = 35", 1.0, True),
        ("form", "34 35 36", 0.0, False),
    ],
)
async def test_a_scorer_rewards_the_right_number_its_digits_or_the_form_alone(
    scorer: str, reply: str, reward: float, is_success: bool
) -> None:
    done = await run_episode(say(reply), scorer=scorer)
    assert done.terminated
    assert (done.reward, done.info["is_success"]) == (reward, is_success)


async def test_the_question_follows_an_example_of_the_form() -> None:
    start = await run_episode()
    assert [message.content for message in start.messages] == [
        "Add or subtract.", "20 + 15 =", "20 + 15 = 35", "58 - 23 =",
    ]  # fmt: skip
    assert not start.tools


async def test_with_the_calculator_only_what_was_calculated_counts() -> None:
    start = await run_episode(calculator=True)
    assert [tool.name for tool in start.tools] == ["calc"]
    assert start.messages[2].tool_calls[0].arguments == '{"e": "20 + 15"}'
    guessed = await run_episode(say("35"), calculator=True)
    assert (guessed.reward, guessed.info["is_right"]) == (0.0, True)
    by_digits = await run_episode(say("35"), calculator=True, scorer="digits")
    assert by_digits.reward == 0.0
    called = ask_tool(("calc", '{"e": "58 - 23"}'))
    assert (await run_episode(called, calculator=True)).messages[0].content == "35"
    assert (await run_episode(called, say("35"), calculator=True)).reward == 1.0
    assert (await run_episode(called, say("36"), calculator=True)).reward == 0.0


async def test_what_is_no_sum_is_refused() -> None:
    with pytest.raises(EnvError, match=r"problem='58 -', expected a sum such as '58 - 23'"):
        await run_episode(problem="58 -")


def test_no_pair_of_numbers_is_both_trained_on_and_held_out() -> None:
    trained, held_out = split_sums(200)
    pairs = [
        {frozenset(problem.split()) - {"+", "-"} for problem in each}
        for each in (trained, held_out)
    ]
    assert len(held_out) == len(pairs[1]) == 200
    assert len(pairs[0]) == 90 * 91 // 2 - 200
    assert not pairs[0] & pairs[1]
    values = [calculate(problem) for problem in trained + held_out]
    assert all(value is not None and 0 <= value <= 198 for value in values)
    assert sum("+" in problem for problem in held_out) > 80  # both signs are asked
    assert split_sums(200)[1] == held_out


def test_a_reply_has_room_for_a_call_of_the_calculator() -> None:
    config = parse_command(TrainingLaunch, GrpoSumsConfig, "", ["--calculator"]).config
    tokens_of_a_call = (
        31  # of SmolLM2: <tool_call>{"name": "calc", "arguments": {"e": "58 - 23"}}</tool_call>
    )
    assert min(config.chat.max_reply or 0, config.engine.max_reply) > tokens_of_a_call


def list_runs(root: Path) -> list[Path]:
    return list(root.glob("grpo_sums-*"))


async def test_one_command_trains_and_asks_the_held_out_sums(tmp_path: Path) -> None:
    tiny(SHAPE, ["Add or subtract. 20 + 15 = 35"], seed=0).save(tmp_path / "policy")
    arguments = (
        f"--run.updates 2 --run.device cpu --run.root {tmp_path} --policy {tmp_path / 'policy'} "
        "--group-size 4 --scheduler.groups-per-update 2 --text.num-envs 8 --num-validation 3 "
        "--scorer form --engine.max-context 256"
    )
    assert await main(parse_command(TrainingLaunch, GrpoSumsConfig, "", arguments.split())) == 0
    (run,) = list_runs(tmp_path)
    assert [int(line["update"]) for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    asked = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    assert sorted((each["weights"], each["start"]) for each in asked) == [
        (weights, start) for weights in (0, 2) for start in range(3)
    ]
