"""The scorers by name, with the extraction of a reply's final answer."""

import datetime
import re
import string
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any, Final, TypeAlias

import msgspec

from vla_rl.errors import ConfigError, DataError, EnvError
from vla_rl.sandbox import CallResult, Fault, ProcessLimits, Sandbox, SandboxConfig
from vla_rl.scoring.own_scorers import check_own_scorer, read_score, require_path
from vla_rl.util.foreign_data import find_spans
from vla_rl.util.imports import check_choice
from vla_rl.util.values import excerpt

_HASHES: Final = re.compile(r"####[ \t]*([^\n]+)")
_LABEL: Final = re.compile(r"(?im)^[ \t*#]*(?:the )?(?:final )?answer(?: is)?[ \t*]*[:=]([^\n]+)$")
_FENCE: Final = re.compile(r"([ \t]*)(`{3,})([^`]*)")
_CLOSING: Final = re.compile(r"([^`]*)(`{3,})[ \t]*+[.,;:]?[ \t]*+")
_PYTHON_TAGS: Final = frozenset({"python", "python3", "py"})


def final_answer(reply: str) -> str:
    """Return the final answer of a reply.

    It is the last `<answer>...</answer>`, `\boxed{...}`, `#### ...` or `Answer: ...`, in that order
    of preference; the whole reply if it has none of them.
    """
    if tags := list(find_spans(reply, "<answer>", "</answer>")):
        start, end = tags[-1]
        return reply[start:end].strip()
    if (boxed := find_last_boxed(reply)) is not None:
        return boxed.strip()
    # The mark of GSM8K's solutions first: it holds the number alone.
    for pattern in (_HASHES, _LABEL):
        if found := pattern.findall(reply):
            return str(found[-1]).strip(" \t\r*")
    return reply.strip()


def find_last_boxed(reply: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, with braces inside it.

    None if there is none, or it is not closed.
    """
    start = reply.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for index in range(begin, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[index], 0)
        if depth == 0:
            return reply[begin:index]
    return None


def find_last_program(reply: str) -> str:
    """Return the program of a reply.

    It is the last fenced block that is tagged as Python, else the last without a tag, else the
    whole reply.
    """
    blocks = find_fenced_blocks(reply)
    python = [text for tag, text in blocks if tag in _PYTHON_TAGS]
    untagged = [text for tag, text in blocks if not tag]
    return (python or untagged or [reply])[-1]


def find_fenced_blocks(reply: str) -> list[tuple[str, str]]:
    """Return tag and text of every closed fenced block, in order.

    Tags are in lower case, "" if a block has none.

    A block ends at the first line that consists of at least as many backticks and at most a
    punctuation mark, or that ends in them. The indentation of its opening is removed from its
    lines.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in reply.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence, []
        elif (closing := _CLOSING.fullmatch(line)) is not None and len(closing[2]) >= len(
            opening[2]
        ):
            tag = opening[3].split()
            # A model that ends its last line with the fence has written the program all the same.
            if closing[1].strip():
                lines.append(closing[1].removeprefix(opening[1]))
            blocks.append((tag[0].lower() if tag else "", "".join(f"{text}\n" for text in lines)))
            opening = None
        else:
            lines.append(line.removeprefix(opening[1]))
    return blocks


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and double spaces.

    This is SQuAD's normal form (Rajpurkar et al. 2016).
    """
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs agree line by line.

    Spaces at the ends of lines and empty lines at the end are ignored.
    """
    return [line.rstrip() for line in printed.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a reply.

    Example:
        A program that passed two of three tests:

        Score(value=0.667, words="test 2: it printed '41\n', expected '42\n'")
    """

    value: float
    """Value of the reply: 1 is right, 0 is wrong; a scorer of your own may return any number."""

    fault: Fault | None = None
    """Fault that stopped the scorer, or the program that it ran. The value is then the share of
    tests passed before (`code`), or 0 (all other scorers)."""

    words: str = ""
    """Description of the error, or of the test that failed."""


Scorer: TypeAlias = Callable[[Sandbox, str, dict[str, Any]], Awaitable[Score]]
"""Called as `await scorer(sandbox, reply, row)`, with a row of the data set."""

_MATH_LIMITS: Final = ProcessLimits(timeout_s=10.0)
_CODE_LIMITS: Final = ProcessLimits(timeout_s=10.0, network=False)
_CODE_BUDGET_S: Final = 60.0
"""Running time of all tests of a row together."""

_OWN_LIMITS: Final = ProcessLimits(timeout_s=30.0)


class CodeTest(msgspec.Struct, frozen=True):
    """One test of a program: its input, and its expected output.

    Example:
        CodeTest(stdin="6 7\n", stdout="42\n")
    """

    stdin: str
    stdout: str


def make_scorer(name: str, *, answer_field: str = "answer") -> Scorer:
    """Return a scorer by its name, or by `module:function`.

    Raises: ConfigError, with the nearest name, if it is unknown, or if there is no such module.
    """
    if ":" in name:
        return _own_scorer(name)
    makers = {"exact": _exact, "match": _match, "math": _math, "code": _code}
    check_choice(makers, name, "scorer", also="any `module:function`")
    return makers[name](answer_field)


def fields_read(scorer: str, prompt_field: str, answer_field: str) -> tuple[str, ...]:
    """Return the columns that every row needs: a scorer of your own may need no answer."""
    return (prompt_field,) if ":" in scorer else (prompt_field, answer_field)


SCORER_NAMES: Final = ("exact", "match", "math", "code")


def _exact(answer_field: str) -> Scorer:
    async def exact(sandbox: Sandbox, reply: str, row: dict[str, Any]) -> Score:
        return Score(value=float(final_answer(reply) == expected_answer(row[answer_field])))

    return exact


def _match(answer_field: str) -> Scorer:
    async def match(sandbox: Sandbox, reply: str, row: dict[str, Any]) -> Score:
        texts = answer_texts(row[answer_field])
        answers = {normalize_answer(final_answer(answer)) for answer in texts}
        return Score(value=float(normalize_answer(final_answer(reply)) in answers))

    return match


def _math(answer_field: str) -> Scorer:
    async def math(sandbox: Sandbox, reply: str, row: dict[str, Any]) -> Score:
        arguments = {"reply": reply, "answer": expected_answer(row[answer_field])}
        result = _isolated(
            await sandbox.call("vla_rl.scoring.math_answers:is_same_math", arguments, _MATH_LIMITS)
        )
        # Faults of the installation and of the data end the run; scored as 0, they would look like
        # a policy that never solves anything.
        if result.fault == "raised" and result.text.startswith("MissingExtra: "):
            raise ConfigError(f"the scorer 'math': {result.text.removeprefix('MissingExtra: ')}")
        if result.fault == "raised" and result.text.startswith("ValueError: the data set's answer"):
            raise DataError(result.text.removeprefix("ValueError: "))
        return Score(value=float(result.value is True), fault=result.fault, words=result.text)

    return math


def _code(answer_field: str) -> Scorer:
    async def code(sandbox: Sandbox, reply: str, row: dict[str, Any]) -> Score:
        """Return the share of the tests that pass, with the first failure.

        A program that hangs ends the tests; so does the end of the budget.
        """
        tests = code_tests(row, answer_field)
        program, num_passed, left_s = find_last_program(reply), 0, _CODE_BUDGET_S
        fault: Fault | None = None
        words = ""
        for number, test in enumerate(tests):
            if left_s <= 0.0:
                fault, words = (
                    "timed_out",
                    words or f"test {number}: the tests before it took {_CODE_BUDGET_S:g} s",
                )
                break
            limits = msgspec.structs.replace(
                _CODE_LIMITS, timeout_s=min(_CODE_LIMITS.timeout_s, left_s)
            )
            # Each test in a process of its own: what one leaves behind must not help, or harm, the
            # next.
            result = _isolated(await sandbox.run_program(program, test.stdin, limits))
            left_s -= result.duration_s
            if result.fault is None and is_same_output(result.stdout, test.stdout):
                num_passed += 1
                continue
            told = (
                result.text
                if result.fault
                else f"it printed {result.stdout[:200]!r}, expected {test.stdout[:200]!r}"
            )
            fault, words = fault or result.fault, words or f"test {number}: {told}"
            # A program that hangs or takes too much memory does so again in each test, 10 s each.
            if result.fault not in (None, "died"):
                break
        return Score(value=num_passed / len(tests), fault=fault, words=words)

    return code


def check_answer(scorer: str, row: dict[str, Any], answer_field: str) -> None:
    """Check that a scorer can compare with a row's answer; one of your own takes any.

    Raises: DataError if it cannot.
    """
    readers: dict[str, Callable[[Any], object]] = {
        "exact": answer_text,
        "math": answer_text,
        "match": answer_texts,
    }
    if scorer == "code":
        code_tests(row, answer_field)
    elif scorer in readers:
        readers[scorer](row[answer_field])


def answer_text(answer: Any) -> str:
    """Return an answer as text: a text, or a number, a truth value or a date in its usual form.

    Raises: DataError for anything else, such as a list.
    """
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, int | float | Decimal | datetime.date | datetime.time):
        raise DataError(f"the answer is {excerpt(answer)}, expected a text or a number")
    return str(answer)


def expected_answer(answer: Any) -> str:
    """Return the final answer of a data set's answer, which may be a whole solution, such as GSM8K's.

    Raises: DataError as `answer_text`.
    """
    return final_answer(answer_text(answer))


def answer_texts(answer: Any) -> list[str]:
    """Return the answers that count as right: one, or a list of them.

    Raises: DataError for anything else.
    """
    if isinstance(answer, list) and not answer:
        raise DataError("the answer is an empty list, expected at least one text")
    return [answer_text(each) for each in (answer if isinstance(answer, list) else [answer])]


def _isolated(result: CallResult) -> CallResult:
    """Return the result of a call.

    Raises: EnvError if the kernel did not isolate it, because it then did not run.
    """
    # Scored as 0, it would punish replies for the state of the machine.
    if result.fault == "not_isolated":
        raise EnvError(
            f"a scorer's process was not isolated ({result.text}); raise "
            "user.max_user_namespaces, or run fewer "
            "conversations at a time"
        )
    return result


def code_tests(row: dict[str, Any], answer_field: str) -> list[CodeTest]:
    """Return the tests of a row for the scorer `code`.

    Raises: DataError if the field is not a list of tests.
    """
    try:
        tests = msgspec.convert(row[answer_field], list[CodeTest])
    except msgspec.ValidationError as error:
        raise DataError(
            f"{answer_field!r} of a row is not a list of tests {{stdin, stdout}}: {error}"
        ) from error
    if not tests:
        raise DataError(
            f"{answer_field!r} of a row is an empty list, expected at least one test "
            f"{{stdin, stdout}}"
        )
    return tests


def _own_scorer(path: str) -> Scorer:
    require_path(path)

    async def own(sandbox: Sandbox, reply: str, row: dict[str, Any]) -> Score:
        result = _isolated(await sandbox.call(path, {"reply": reply, "row": row}, _OWN_LIMITS))
        return Score(value=read_score(path, result), fault=result.fault, words=result.text)

    return own


async def check_scorer(name: str, config: SandboxConfig | None = None) -> None:
    """Check a scorer before it is needed; one of your own is imported in a sandbox, and not called.

    Raises: ConfigError if it is unknown, or cannot be called with a reply and its row.
    """
    make_scorer(name)
    if ":" in name:
        await check_own_scorer(name, config)
