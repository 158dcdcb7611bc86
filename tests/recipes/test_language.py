"""The recipes of language policies, and their page."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from vla_rl.cli.command_line import Launch, TrainingLaunch, parse_command
from vla_rl.errors import ConfigError, DataError
from vla_rl.models.language import (
    CausalLanguageModel,
    TinyConfig,
    tiny,
)
from vla_rl.recipes import (
    grpo_pair,
    grpo_prompts,
    grpo_squares,
    grpo_text,
    sft_text,
    side_by_side,
    srpo_toy,
)
from vla_rl.recipes.grpo_pair import AGENTS, GrpoPairConfig, load_policies
from vla_rl.recipes.grpo_prompts import (
    GrpoPromptsConfig,
    check_prompts,
    main,
    row_starts,
    split_rows,
)
from vla_rl.reporting import read_metrics
from vla_rl.types import SOLE_MEMBER, Message

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=128,
)
ROWS: list[dict[str, Any]] = [
    {"question": f"{number}+1?", "gold": str(number + 1), "answer": "x"} for number in range(8)
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def arguments(root: Path, prompts: str, *more: str) -> list[str]:
    small = (
        "--run.updates 2 --run.device cpu --group-size 4 --scheduler.groups-per-update 2 "
        "--text.num-envs 8"
    )
    names = f"--run.root {root} --policy {root / 'policy'} --prompts {prompts}"
    return [
        *f"{small} {names} --engine.max-reply 6 --num-validation 2 --num-tries 2".split(),
        *more,
    ]


def runs_in(root: Path) -> list[Path]:
    return list(root.glob("grpo_prompts-*"))


def config_of(prompts: str, **fields: Any) -> GrpoPromptsConfig:
    return GrpoPromptsConfig(prompts=prompts, num_validation=0, **fields)


async def test_one_command_trains_on_a_file_of_questions(tmp_path: Path) -> None:
    tiny(SHAPE, ["What is 1+1?"], seed=0).save(tmp_path / "policy")
    prompts = write(tmp_path / "sums.jsonl", ROWS)
    more = (
        "--prompt-field",
        "question",
        "--scorer",
        "rewarded_texts:score",
        "--learner.optimizer.lr",
        "1e-2",
    )
    command = parse_command(
        TrainingLaunch, GrpoPromptsConfig, "", arguments(tmp_path, prompts, *more)
    )
    assert await main(command) == 0
    (run,) = runs_in(tmp_path)
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [int(line["update"]) for line in lines] == [1, 2]
    assert all(0.0 < line["reward/mean"] < 1.0 for line in lines)
    assert sum(line["update/trained"] for line in lines) > 0
    validation = [
        msgspec.json.decode(line) for line in (run / "validation.jsonl").read_bytes().splitlines()
    ]
    assert {(line["weights"], line["start"]) for line in validation} == {
        (0, 0),
        (0, 1),
        (2, 0),
        (2, 1),
    }
    assert (
        CausalLanguageModel.load(run / "checkpoints" / "update-000002" / "policy").context_size
        == 128
    )


async def test_a_scorer_is_looked_for_before_the_policy_is_loaded(tmp_path: Path) -> None:
    prompts = write(tmp_path / "sums.jsonl", ROWS)
    options = ("--prompt-field", "question", "--scorer", "rewarded_texts:absent", "--dry-run")
    command = parse_command(
        TrainingLaunch, GrpoPromptsConfig, "", arguments(tmp_path, prompts, *options)
    )
    with pytest.raises(ConfigError, match=r"'rewarded_texts:absent': .*has no attribute 'absent'"):
        await main(command)  # and not CheckpointError: there is no such policy


def test_held_out_rows_are_never_trained_on_and_the_seed_chooses_them(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "rows.jsonl", ROWS), prompt_field="question")
    config = msgspec.structs.replace(config, num_validation=3)
    trained, held_out = split_rows(config)
    assert (len(trained), len(held_out)) == (5, 3)
    assert sorted(trained + held_out) == list(range(8))
    assert split_rows(config) == (trained, held_out)
    assert [start.options for start in row_starts(config, held_out)] == [
        {"row": number} for number in held_out
    ]


def test_parquet_does_as_well(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "1?", "answer": "1"}] * 3), path
    )
    config = config_of(str(path), system="Answer.")
    assert split_rows(config) == ([0, 1, 2], [])
    policy = tiny(SHAPE, ["1?"], seed=0)
    with_system, without = (check_prompts(each, policy) for each in (config, config_of(str(path))))
    assert with_system.num_tokens > without.num_tokens > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1?"}, r"row 1 \(line 2\) has no 'answer'; known: 'prompt'"),
        (
            {"prompts": "1?", "answer": "1"},
            r"row 1 \(line 2\) has no 'prompt'; did you mean 'prompts'\?",
        ),
        ({"prompt": None, "answer": "1"}, r"row 1 \(line 2\) has no 'prompt'"),
        ({"prompt": " ", "answer": "1"}, "'prompt' of row 1 of .* is empty, expected a question"),
        (
            {"prompt": [{"role": "user", "content": ""}], "answer": "1"},
            "'prompt' of row 1 of .* is empty",
        ),
        (
            {"prompt": 7, "answer": "1"},
            "'prompt' of row 1 of .* is neither a text nor a list of messages",
        ),
        (
            {"prompt": "so long " * 200, "answer": "1"},
            r"'prompt' of row 1 of .* tokens and the context 128, expected room",
        ),
    ],
)
def test_a_bad_row_is_named_before_anything_starts(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    config = config_of(write(tmp_path / "rows.jsonl", [{"prompt": "1?", "answer": "1"}, row]))
    with pytest.raises(DataError, match=message):
        check_prompts(config, tiny(SHAPE, ["1?"], seed=0))


@pytest.mark.parametrize(("rows", "held_out"), [(1, 0), (6, 1), (319, 63), (320, 64), (400, 64)])
def test_a_small_file_holds_out_a_fifth_unless_the_number_is_set(
    tmp_path: Path, rows: int, held_out: int
) -> None:
    prompts = write(tmp_path / "rows.jsonl", [{"prompt": "1?", "answer": "1"}] * rows)
    split = split_rows(GrpoPromptsConfig(prompts=prompts))
    assert tuple(map(len, split)) == (rows - held_out, held_out)


def test_too_few_rows_and_unknown_scorers_are_refused(tmp_path: Path) -> None:
    prompts = write(tmp_path / "rows.jsonl", ROWS)
    fields = {"prompt_field": "question"}
    with pytest.raises(DataError, match="8 rows and num_validation=8 of them are held out"):
        split_rows(msgspec.structs.replace(config_of(prompts, **fields), num_validation=8))
    with pytest.raises(ConfigError, match=r"scorer 'mat' is unknown; did you mean 'math'\?"):
        row_starts(config_of(prompts, scorer="mat", **fields), [0])


@pytest.mark.parametrize(
    ("scorer", "answer", "message"),
    [
        ("exact", ["42"], r"the answer is \['42'\], expected a text or a number"),
        ("math", {"value": 42}, "expected a text or a number"),
        ("match", ["42", ["7"]], r"the answer is \['7'\], expected a text or a number"),
        ("match", [], "empty list"),
    ],
)
def test_answers_are_looked_at_before_anything_starts(
    scorer: str, answer: Any, message: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "1?", "answer": 1}, {"prompt": "2?", "answer": answer}]
    config = config_of(write(tmp_path / "rows.jsonl", rows), scorer=scorer)
    with pytest.raises(DataError, match=f"'answer' of row 1 of .*{message}"):
        check_prompts(config, tiny(SHAPE, ["1?"], seed=0))


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "is an empty list"),
        ("print(1)", "is not a list of tests"),
        ([{"stdin": "1"}], "is not a list of tests"),
    ],
)
def test_tests_of_programs_are_looked_at_before_anything_starts(
    tests: Any, message: str, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "1?", "answer": [{"stdin": "", "stdout": "1"}]},
        {"prompt": "2?", "answer": tests},
    ]
    config = config_of(write(tmp_path / "rows.jsonl", rows), scorer="code")
    with pytest.raises(DataError, match=f"'answer' of row 1 of .*{message}"):
        check_prompts(config, tiny(SHAPE, ["1?"], seed=0))


class Strict:
    """A policy whose chat template takes questions only."""

    context_size = 128

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Raises: ValueError for any other role."""
        if roles := [message.role for message in messages if message.role != "user"]:
            raise ValueError(f"the chat template rejects a conversation of roles {roles}")
        return np.arange(4)


def test_a_system_message_that_the_template_refuses_is_named_as_the_option(tmp_path: Path) -> None:
    config = config_of(write(tmp_path / "rows.jsonl", [{"prompt": "1?", "answer": "1"}]))
    config = msgspec.structs.replace(config, system="Answer.")
    with pytest.raises(
        ConfigError, match=r"system='Answer.': the chat template rejects .* without it"
    ):
        check_prompts(config, Strict())  # type: ignore[arg-type]


def test_a_conversation_that_the_template_refuses_is_named_by_its_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1?", "answer": "1"},
        {"prompt": [{"role": "tool", "content": "2?"}], "answer": "2"},
    ]
    config = config_of(write(tmp_path / "rows.jsonl", rows))
    with pytest.raises(
        DataError,
        match=r"'prompt' of row 1 of .*: the chat template rejects .* roles \['tool'\]; leave",
    ):
        check_prompts(config, Strict())  # type: ignore[arg-type]


PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
COMMANDS = [
    (name, rest.partition("#")[0])
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for name, rest in re.findall(r"^python -m vla_rl\.recipes\.(\w+)(.*)$", block, re.MULTILINE)
]
CONFIGS = {
    "sft_text": (Launch, sft_text.SftTextConfig),
    "grpo_text": (TrainingLaunch, grpo_text.GrpoTextConfig),
    "grpo_pair": (TrainingLaunch, grpo_pair.GrpoPairConfig),
    "grpo_prompts": (TrainingLaunch, grpo_prompts.GrpoPromptsConfig),
    "grpo_squares": (TrainingLaunch, grpo_squares.GrpoSquaresConfig),
    "side_by_side": (TrainingLaunch, side_by_side.SideBySideConfig),
}


def test_all_recipes_for_language_are_on_the_page() -> None:
    assert {name for name, _ in COMMANDS} == CONFIGS.keys()


@pytest.mark.parametrize(("name", "rest"), COMMANDS)
def test_a_command_of_the_page_is_understood(name: str, rest: str) -> None:
    launch, config = CONFIGS[name]
    words = shlex.split(rest)
    said = parse_command(launch, config, "", words).config
    for option, value in zip(words[::2], words[1::2], strict=True):
        found: Any = said
        for field in option.removeprefix("--").replace("-", "_").split("."):
            found = getattr(found, field)
        assert str(found) == value


def test_without_a_policy_for_a_pair_the_command_that_makes_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"policy is 'pair_base', the default.*--out pair_base`"):
        load_policies(GrpoPairConfig())


def test_the_commands_for_a_pair_differ_in_who_learns_when(tmp_path: Path) -> None:
    shape = TinyConfig(
        hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, vocab_size=300
    )
    tiny(shape, ["go"], seed=0).save(tmp_path / "pair_base")
    found = []
    for name, rest in COMMANDS:
        if name == "grpo_pair":
            words = [
                str(tmp_path / word) if word == "pair_base" else word for word in shlex.split(rest)
            ]
            config = parse_command(TrainingLaunch, GrpoPairConfig, "", words).config
            team = load_policies(config)
            found.append((config.advantage.name, list(team.members), team.updates_per_turn))
    assert found == [
        ("grpo", [SOLE_MEMBER], None),
        ("grpo", list(AGENTS), None),
        ("grpo", list(AGENTS), 2),
        ("marft_gae", [SOLE_MEMBER], None),
    ]


async def test_two_kinds_of_policies_train_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = re.findall(r"```python\n# train_both\.py\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "train_both.py", "exec"), names)
    monkeypatch.chdir(tmp_path)
    shape = TinyConfig(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        vocab_size=300,
        context_size=512,
    )
    tiny(shape, ["What is 1+1?"], seed=0).save(tmp_path / "language")
    srpo_toy.new_policy(srpo_toy.SrpoToyConfig()).save(tmp_path / "robot")
    outcome = await names["train_both"](str(tmp_path / "robot"), str(tmp_path / "language"))
    assert outcome.progress.update == 2
    assert outcome.progress.tasks.keys() == {"reach", "sums"}
