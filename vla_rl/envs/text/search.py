"""A local index that a tool can search: BM25 over the documents of one file."""

import threading
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.datasets.prompts import PromptRows, read_prompts
from vla_rl.errors import DataError
from vla_rl.util.foreign_text import required_text

_OPENED: Final[dict[tuple[str, int], "SearchIndex"]] = {}
_OPENING: Final = threading.Lock()


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a search."""

    row: int
    """Row in the file, from 0."""

    score: float
    """BM25 score; higher is nearer."""

    title: str
    text: str

    def as_text(self) -> str:
        """Return the title, if there is one, and the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class SearchIndex:
    """BM25 (Robertson & Zaragoza 2009, as bm25s computes it) over the `text` and `title` of rows.

    Raises: DataError for a row whose text or title is no text.
    """

    def __init__(self, rows: PromptRows) -> None:
        import bm25s  # needed only for searches

        self._rows, self._bm25s = rows, bm25s
        texts = [f"{title} {text}" for title, text in map(_title_and_text, rows, count())]
        self._index: Any = bm25s.BM25()
        self._index.index(
            bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False
        )

    def search(self, query: str, most: int) -> list[Document]:
        """Return the nearest documents, the best first.

        Documents without a word of the query are left out.
        """
        tokens = self._bm25s.tokenize(
            [query], stopwords="en", show_progress=False, return_ids=False
        )
        if not tokens[0]:
            return []
        most = min(most, len(self._rows))
        found, scores = self._index.retrieve(tokens, k=most, show_progress=False)
        return [
            self._document(int(row), float(score))
            for row, score in zip(found[0], scores[0], strict=True)
            if score > 0
        ]

    def _document(self, row: int, score: float) -> Document:
        title, text = _title_and_text(self._rows[row], row)
        return Document(row=row, score=score, title=title, text=text)


def _title_and_text(row: dict[str, Any], number: int) -> tuple[str, str]:
    title, text = row.get("title"), row["text"]
    return (
        "" if title is None else required_text(title, f"'title' of row {number}"),
        required_text(text, f"'text' of row {number}"),
    )


def open_index(path: str | Path) -> SearchIndex:
    """Return the index of a file of documents; built once, from any thread.

    Raises: DataError; ConfigError.
    """
    path = Path(path)
    rows = read_prompts(path, ("text",))
    key = (str(path.resolve()), path.stat().st_mtime_ns)
    with _OPENING:
        if key not in _OPENED:
            try:
                _OPENED[key] = SearchIndex(rows)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
        return _OPENED[key]
