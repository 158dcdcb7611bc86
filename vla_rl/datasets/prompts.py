"""Rows of a prompt data set, from parquet or jsonl, with the prompt of a row as messages.

A row is one question, with the fields that its scorer needs.

    questions.jsonl   {"prompt": "What is 6 x 7?", "answer": "42"}
    questions.parquet the same as columns

Every row is checked when the file is opened, so that a missing answer does not stop a run hours
later. The prompt is a text, or messages in OpenAI's form:

    "What is 3+4?"
    [{"role": "user", "content": "What is 3+4?"}]
    [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3+4?"}]}]
    [..., {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": ..., "arguments": ...}}]}]

Parquet writes null for what a message lacks and another one has, so a null is the same as nothing.
"""

import codecs
import functools
import json
import logging
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import DataError
from vla_rl.types import Message, ToolCall
from vla_rl.util.imports import pa, pq, suggest
from vla_rl.util.values import excerpt

logger = logging.getLogger(__name__)

_OPENED_FILES: Final[dict[tuple[str, int, int, tuple[str, ...]], "PromptRows"]] = {}
_OPENING_LOCK: Final = threading.Lock()


class PromptRows(Sequence[dict[str, Any]]):
    """The rows of one file, in its order; parquet's stay columns until a row is read.

    Args:
        table: the rows.
        path: the file, for errors.
        fields: fields that each row has to have. Another column with a value that Python has no
            type for, such as a time to the nanosecond, is left out, with a warning.
    """

    def __init__(
        self,
        table: "pa.Table | list[dict[str, Any]]",
        path: Path | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        self._table, self._path, self._fields = table, path, tuple(fields)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        """Return row `index` as a dict; a slice returns a list of them."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"row {index} of a data set that has {len(self)} rows, numbered from 0"
            )
        if isinstance(self._table, list):
            return self._table[index]
        return self._row(index % len(self))

    def _row(self, index: int) -> dict[str, Any]:
        assert isinstance(self._table, pa.Table)
        while True:
            columns = self._table.slice(index, 1)
            try:
                row: dict[str, Any] = columns.to_pylist()[0]
            except (ValueError, OverflowError, pa.ArrowException) as error:
                name = next(
                    name for name in columns.column_names if not _is_readable(columns, name)
                )
                if name in self._fields:
                    raise DataError(f"{self._path}: row {index}, {name!r}: {error}") from error
                logger.warning("%s: the column %r is left out: %s", self._path, name, error)
                # Left out at the first row that needs it and not at the opening: converting
                # millions of rows to find out takes minutes.
                self._table = self._table.drop_columns([name])
            else:
                return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


def _is_readable(columns: "pa.Table", name: str) -> bool:
    try:
        columns.column(name).to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return False
    return True


def read_prompts(path: str | Path, fields: Sequence[str] = ("prompt",)) -> PromptRows:
    """Read the rows of a `.parquet` or `.jsonl` file.

    The same file is read only once, from any thread.

    Args:
        path: the file.
        fields: fields that each row must have, with a value other than null.

    Raises: DataError, naming the file, the row (counted from 0) and the field.
    """
    path = Path(path)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise DataError(
            f"{path} is no file{reason}; expected the .parquet or .jsonl file of a data set."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no file; expected the .parquet or .jsonl file of a data set.")
    # hundreds of episodes ask for the same file at once; a file that changed is another one
    key = (str(path.resolve()), status.st_mtime_ns, status.st_size, tuple(fields))
    with _OPENING_LOCK:
        if key not in _OPENED_FILES:
            _OPENED_FILES[key] = _read_file(path, fields)
        return _OPENED_FILES[key]


def _read_file(path: Path, fields: Sequence[str]) -> PromptRows:
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path} is neither .parquet nor .jsonl; expected one of them.")
    read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
    try:
        rows = PromptRows(read(path, fields), path, fields)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(rows) == 0:
        raise DataError(f"{path} has no rows, expected at least one.")
    return rows


def _read_parquet(path: Path, fields: Sequence[str]) -> "pa.Table":
    try:
        table = pq.read_table(path)
        # a text column may hold any bytes, which else fail only when a row is read
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a parquet file with texts in UTF-8: {error}; write it again."
        ) from error
    for field in fields:
        if field not in table.column_names:
            raise DataError(
                f"{path}: row 0, like all others, has no field {field!r}"
                f"{suggest(field, table.column_names)}"
            )
        column = table.column(field)
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(
                f"{path}: row {row} has no {field!r} (it is null), expected a value in every row."
            )
    return table


def _read_jsonl(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    _require_utf8(path)
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                # Programs of Windows write one at the beginning of a file in UTF-8, which JSON does
                # not allow.
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (ValueError, RecursionError) as error:  # not a JSON object, or not UTF-8
                raise DataError(
                    f"{path}: row {len(rows)} (line {number}) is not a JSON object: {error}"
                ) from error
            for field in fields:
                if row.get(field) is None:
                    raise DataError(
                        f"{path}: row {len(rows)} (line {number}) has no {field!r}"
                        f"{suggest(field, [name for name in row if name != field])}"
                    )
            rows.append(row)
    return rows


def _require_utf8(path: Path) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, as some programs of Windows write it."""
    with path.open("rb") as file:
        begin = file.read(4)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError(f"{path} is in UTF-16 or UTF-32, expected UTF-8; save it as UTF-8.")


UNUSED_PARTS: Final = frozenset(
    {"images", "image", "videos", "video", "audios", "audio", "function_call", "refusal"}
)
"""Fields of a message that hold a part of it which no prompt here can have."""


class _RawFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _RawCall(msgspec.Struct):
    """A call in OpenAI's form, or its function alone."""

    id: str | None = None
    type: str | None = None
    function: _RawFunction | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _RawPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _RawMessage(msgspec.Struct):
    role: str
    content: str | list[_RawPart] | None = None
    tool_calls: list[_RawCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


KNOWN_FIELDS: Final = (
    frozenset(field.name for field in msgspec.structs.fields(_RawMessage)) | UNUSED_PARTS
)


def first_messages(asked: Any, system: str, label: str) -> tuple[Message, ...]:
    """Return the first messages about a prompt: the system's, if there is one, and the prompt.

    Raises: DataError, with the label, if the prompt is neither text nor messages.
    """
    messages = prompt_messages(asked, label)
    return (Message(role="system", content=system), *messages) if system else messages


def prompt_messages(asked: Any, label: str) -> tuple[Message, ...]:
    """Return a prompt as messages; parts of text are joined, and tool calls kept.

    Args:
        asked: the prompt.
        label: names field, row and file in errors.

    Raises: DataError for anything else than text.
    """
    if isinstance(asked, str):
        return (Message(role="user", content=asked),)
    if not isinstance(asked, list) or not asked:
        raise DataError(
            f"{label} is neither a text nor a list of messages with role and content: it is "
            f"{excerpt(asked)}."
        )
    return tuple(
        _parse_message(said, f"message {number} of {label}") for number, said in enumerate(asked)
    )


def _parse_message(said: Any, label: str) -> Message:
    if not isinstance(said, dict) or said.get("role") is None:
        raise DataError(f"{label} is {excerpt(said)}, expected an object with role and content.")
    unused = sorted(name for name in UNUSED_PARTS & said.keys() if said[name] not in (None, [], ""))
    if unused:
        raise DataError(
            f"{label} has {', '.join(map(repr, unused))}, expected text and tool calls alone; write "
            "what the policy should read into its content."
        )
    for name in sorted(map(str, said.keys() - KNOWN_FIELDS)):
        # A null is the same as nothing: parquet writes one for each field that any other row has.
        if said[name] is not None:
            _warn_unused_field(name)
    try:
        read = msgspec.convert(said, _RawMessage)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DataError(f"{label} is not a message with role and content: {error}.") from error
    calls = tuple(
        _parse_call(call, number, label) for number, call in enumerate(read.tool_calls or ())
    )
    # Chat templates drop them from other roles without a word, and the policy would be trained on
    # half of a conversation.
    if calls and read.role != "assistant":
        raise DataError(
            f"{label} has tool calls and the role {read.role!r}, expected them of an assistant."
        )
    if read.content is None and not calls:
        raise DataError(
            f"{label} has no content, expected a text; only an assistant's message with tool_calls "
            "may have none."
        )
    return Message(
        role=read.role,
        content=_join_text(read.content, label),
        tool_calls=calls,
        tool_call_id=read.tool_call_id,
        name=read.name,
    )


@functools.lru_cache(maxsize=64)
def _warn_unused_field(name: str) -> None:
    """Warn, once for each field."""
    logger.warning(
        "the field %r of a prompt's messages is not read; the policy does not see it", name
    )


def _join_text(content: str | list[_RawPart] | None, label: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise DataError(
                f"part {number} of {label} is of the type {part.type!r}"
                f"{' without text' if part.text is None else ''}, expected parts of text alone; "
                "leave the row out."
            )
    return "".join(part.text or "" for part in content)


def _parse_call(call: _RawCall, number: int, label: str) -> ToolCall:
    function = call.function
    if function is None and call.name is not None:
        function = _RawFunction(call.name, call.arguments)
    if function is None or call.type not in (None, "function"):
        raise DataError(
            f"tool call {number} of {label} is no call of a function, expected "
            '{"function": {"name": ..., "arguments": ...}}.'
        )
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise DataError(
            f"the arguments of tool call {number} of {label} are {excerpt(arguments)}, expected a "
            "JSON object."
        )
    return ToolCall(
        id=f"call_{number}" if call.id is None else call.id,
        name=function.name,
        arguments=arguments,
    )
