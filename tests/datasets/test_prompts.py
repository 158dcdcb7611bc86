"""Prompts are read from parquet or jsonl, with the images of their rows.

Whatever is missing is named with its row, when the file is opened; an image that cannot be read is
refused by row.
"""

import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from vla_rl.datasets.image_files import read_images, row_messages, show_images
from vla_rl.datasets.prompts import first_messages, prompt_messages, read_prompts
from vla_rl.errors import DataError
from vla_rl.types import Message, ToolCall

ROWS: list[dict[str, Any]] = [{"prompt": "6x7?", "answer": "42"}, {"prompt": "1+1?", "answer": "2"}]

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
KINDS = ("png", "jpg", "webp", "bmp", "tiff")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        import json

        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_both_layouts_give_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = read_prompts(write(tmp_path / name, ROWS), ("prompt", "answer"))
    assert list(rows) == ROWS
    assert (len(rows), rows[1], rows[-1], rows[0:1]) == (2, ROWS[1], ROWS[1], ROWS[:1])
    with pytest.raises(IndexError, match="row 2 of a data set that has 2 rows"):
        rows[2]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_without_its_field_is_named(tmp_path: Path, name: str) -> None:
    rows = [*ROWS, {"prompt": "2+2?", "answer": None}]
    with pytest.raises(DataError, match=rf"{name}: row 2.* has no 'answer'"):
        read_prompts(write(tmp_path / name, rows), ("prompt", "answer"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_field_that_no_row_has_is_named_with_the_nearest(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError,
        match=r"row 0.* has no .*'prompts'; did you mean 'prompt'\?",
    ):
        read_prompts(write(tmp_path / name, ROWS), ("prompts",))


def test_a_line_that_is_no_object_is_named_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n[1]\n')
    with pytest.raises(DataError, match=r"row 1 \(line 3\) is not a JSON object"):
        read_prompts(path)
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"row 0 \(line 1\) is not a JSON object"):
        read_prompts(path)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "6x7?"}\r\n{"prompt": "1+1?"}\r\n')
    assert [row["prompt"] for row in read_prompts(path)] == ["6x7?", "1+1?"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "in UTF-16 or UTF-32, expected UTF-8"),
        ("rows.jsonl", '{"prompt": "a"}\n'.encode("utf-32"), "in UTF-16 or UTF-32, expected UTF-8"),
        ("rows.jsonl", b'{"prompt": "\\ud835"}', r"row 0 \(line 1\) is not a JSON object"),
        ("rows.csv", b"prompt\n", "neither .parquet nor .jsonl"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.parquet", b"PAR", "is not a parquet file"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        read_prompts(tmp_path / name)
    with pytest.raises(DataError, match="is no file; expected"):
        read_prompts(tmp_path / "absent.jsonl")
    for name in (f"{'a' * 300}.jsonl", "a\0b.jsonl", "."):
        with pytest.raises(DataError, match="is no file"):
            read_prompts(tmp_path / name)


def test_a_column_that_python_has_no_type_for_is_left_out_unless_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.parquet"
    made = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    table = pyarrow.table({"prompt": ["6x7?", "1+1?"], "made": made, "answer": ["42", "2"]})
    pyarrow.parquet.write_table(table, path)
    rows = read_prompts(path, ("prompt", "answer"))
    assert list(rows) == ROWS
    assert [record.message.split(":")[1] for record in caplog.records] == [
        " the column 'made' is left out"
    ]
    with pytest.raises(DataError, match=r"row 1, 'made': Nanosecond"):
        read_prompts(path, ("made",))[1]


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    first = read_prompts(path)
    assert read_prompts(path) is first
    write(path, ROWS * 2)
    assert len(read_prompts(path)) == 4


LABEL = "'prompt' of row 3 of rows.jsonl"
ASKED = {"role": "user", "content": "What is 3+4?"}
ADD = ToolCall(id="call_0", name="add", arguments='{"a": 3}')


def called(**call: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ("What is 3+4?", [Message(role="user", content="What is 3+4?")]),
        ([ASKED], [Message(role="user", content="What is 3+4?")]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "What is 3+4?"}]}],
            [Message(role="user", content="What is 3+4?")],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is ", "image_url": None},
                        {"text": "3+4?"},
                    ],
                }
            ],
            [Message(role="user", content="What is 3+4?")],
        ),
        (
            [
                *called(
                    id="c1", type="function", function={"name": "add", "arguments": '{"a": 3}'}
                ),
                {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
            ],
            [
                Message(role="user", content="What is 3+4?"),
                Message(
                    role="assistant",
                    tool_calls=(ToolCall(id="c1", name="add", arguments='{"a": 3}'),),
                ),
                Message(role="tool", content="7", tool_call_id="c1", name="add"),
            ],
        ),
    ],
)
def test_texts_and_calls_are_read(asked: Any, messages: list[Message]) -> None:
    assert prompt_messages(asked, LABEL) == tuple(messages)
    assert first_messages(asked, "Be brief.", LABEL) == (
        Message(role="system", content="Be brief."),
        *messages,
    )


@pytest.mark.parametrize(
    "asked",
    [
        called(function={"name": "add", "arguments": {"a": 3}}),
        called(name="add", arguments={"a": 3}),
        called(name="add", arguments='{"a": 3}'),
    ],
)
def test_a_call_may_be_written_in_several_ways(asked: Any) -> None:
    assert prompt_messages(asked, LABEL)[1].tool_calls == (ADD,)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (7, f"{LABEL} is neither a text nor a list of messages .* it is 7"),
        ([], "neither a text nor a list"),
        ({"role": "user", "content": "x"}, "neither a text nor a list"),
        (["text"], f"message 0 of {LABEL} is 'text', expected an object with role and content"),
        ([{"content": "x"}], "expected an object with role and content"),
        ([{"role": 7, "content": "x"}], r"Expected `str`, got `int` - at `\$.role`"),
        ([{"role": "user", "content": 7}], r"got `int` - at `\$.content`"),
        ([ASKED, {"role": "user", "content": None}], f"message 1 of {LABEL} has no content"),
        ([{"role": "user"}], "has no content, expected a text"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            f"part 0 of message 0 of {LABEL} is of the type 'image_url' without text",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "without text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 7}]}],
            r"at `\$.content\[0\].text`",
        ),
        ([{"role": "user", "content": ["x"]}], r"at `\$.content\[0\]`"),
        ([{**ASKED, "images": ["x.png"]}], "has 'images', expected text and tool calls alone"),
        ([{**ASKED, "function_call": {"name": "add"}}], "has 'function_call'"),
        ([{**ASKED, "tool_calls": [{"name": "add"}]}], "tool calls and the role 'user'"),
        (called(type="function"), "tool call 0 of message 1 of .* is no call of a function"),
        (called(type="web_search", name="add"), "is no call of a function"),
        (called(name="add", arguments="3"), "arguments of tool call 0 .* are '3', expected a JSON"),
        (called(name="add", arguments=[3]), r"at `\$.tool_calls\[0\].arguments`"),
        (called(name="add", arguments="["), "expected a JSON object"),
    ],
)
def test_what_is_no_text_is_named_with_its_row_and_message(asked: Any, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        prompt_messages(asked, LABEL)
    assert LABEL in str(caught.value)


def test_parquet_gives_the_same_messages_though_it_fills_in_nulls(tmp_path: Path) -> None:
    asked = [
        {**ASKED, "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 3}'}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "call_0"},
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": asked}]), path)
    (row,) = read_prompts(path)
    assert row["prompt"] != asked  # nulls stand where a message lacks a field
    assert prompt_messages(row["prompt"], LABEL) == prompt_messages(asked, LABEL)


def test_a_field_that_is_not_read_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        prompt_messages([{**ASKED, "weight_of_a_test": 1, "empty": None}], LABEL)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "the field 'weight_of_a_test' of a prompt's messages is not read; the policy does not see it"
    ]


def write_image(path: Path, image: np.ndarray = IMAGE) -> bytes:
    assert cv2.imwrite(str(path), image[..., ::-1])
    return path.read_bytes()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jpg"])
def test_paths_bytes_and_lists_of_both_give_the_pixels_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    data = write_image(tmp_path / f"a.{kind}")
    for value in (f"a.{kind}", {"path": f"a.{kind}"}, {"bytes": data, "path": None}, data):
        (found,) = read_images(value, tmp_path, "row 0")
        np.testing.assert_array_equal(found, IMAGE)
    assert len(read_images([f"a.{kind}", {"bytes": data}], tmp_path, "row 0")) == 2
    assert read_images(None, tmp_path, "row 0") == ()


def test_grey_deep_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    grey = IMAGE[..., 0]
    cv2.imwrite(str(tmp_path / "grey.png"), grey)
    cv2.imwrite(str(tmp_path / "deep.png"), grey.astype(np.uint16) * 257)
    clear = np.dstack([IMAGE[..., ::-1], np.zeros((40, 60), np.uint8)])
    cv2.imwrite(str(tmp_path / "clear.png"), clear)
    names = ["grey.png", "deep.png", "clear.png"]
    flat, deep, white = read_images(names, tmp_path, "row 0")
    np.testing.assert_array_equal(flat, np.dstack([grey] * 3))
    np.testing.assert_array_equal(deep, flat)
    assert (white == 255).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.97])
def test_an_image_file_that_is_cut_short_is_refused_by_name(
    kind: str, share: float, tmp_path: Path
) -> None:
    whole = write_image(tmp_path / f"a.{kind}")
    (tmp_path / f"a.{kind}").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=rf"image 0 of 'images' of row 3, .*a\.{kind}, .* again"):
        read_images([f"a.{kind}"], tmp_path, "'images' of row 3")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", r"image 0 of row 1, .*missing\.png, cannot be read: .*No such file"),
        ("http://host/a.png", "cannot be read"),
        ("a\0.png", "cannot be read"),
        (7, "is 7, expected the path of a file, or an object with its bytes"),
        ({"bytes": None, "path": None}, "expected the path of a file"),
        (b"GIF89a", "is no image that OpenCV reads"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_images(value, tmp_path, "row 1")


def test_images_go_where_the_marks_are_or_to_the_first_message_of_the_user() -> None:
    system = Message(role="system", content="Look.")
    first, second = (
        Message(role="user", content="<image>\nWhich?"),
        Message(role="user", content="b"),
    )
    shown = show_images((system, first, second), [IMAGE], "row 0")
    assert [len(each.images) for each in shown] == [0, 1, 0]
    assert shown[1].content == "Which?"
    both = show_images((system, second, second), [IMAGE, IMAGE], "row 0")
    assert [len(each.images) for each in both] == [0, 2, 0]
    with pytest.raises(
        DataError, match=r"row 0 has 1 marks <image> .* and 2 images, expected as many"
    ):
        show_images((first,), [IMAGE, IMAGE], "row 0")
    with pytest.raises(DataError, match=r"row 0 has 0 marks .* and 1 images"):
        show_images((system,), [IMAGE], "row 0")


def test_a_row_without_the_field_is_named(tmp_path: Path) -> None:
    row = {"prompt": "a?", "image": "a.png"}
    with pytest.raises(DataError, match=r"row 4 has no 'images'; did you mean 'image'\?"):
        row_messages(row, "prompt", "", "row 4", "images", tmp_path)
