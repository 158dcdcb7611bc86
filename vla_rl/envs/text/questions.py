"""Tasks of one question from a data set: about its text, its images, or documents to search.

user       (image) How many blocks are there?
assistant  3
"""

import asyncio
import operator
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, SupportsIndex

import msgspec

from vla_rl.datasets.image_files import row_messages
from vla_rl.datasets.prompts import PromptRows, read_prompts
from vla_rl.envs.text.task import Ask, Done, TextLimits, TextTask
from vla_rl.errors import DataError
from vla_rl.scoring import fields_read, make_scorer
from vla_rl.types import Info
from vla_rl.util.foreign_data import require_text


class QuestionTask(TextTask):
    """One row of a data set, rewarded with its score.

    `options={"row": 17}` selects it, or else the seed.

    Args:
        data: a `.parquet` or `.jsonl` file (see `vla_rl.datasets.prompts`).
        scorer: `exact`, `match`, `math`, `code`, or `module:function` (see `vla_rl.scoring`).
        prompt_field: column of the question: a text, or a list of messages with `role` and
            `content` (see `vla_rl.datasets.prompts`).
        answer_field: column that the scorer compares with; for `code`, a list of tests
            `{"stdin": ..., "stdout": ...}`. With a scorer of your own, rows need none.
        system: system message at the start, for example the expected format of an answer.
        success_at: lowest score that counts as success.
        image_field: column of images that the question shows (see `vla_rl.datasets.image_files`);
            empty: none.
    """

    limits = TextLimits(max_turns=1)

    def __init__(
        self,
        data: str,
        scorer: str = "exact",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        system: str = "",
        success_at: float = 1.0,
        image_field: str = "",
    ) -> None:
        self._data, self._system, self._success_at = data, system, success_at
        self._image_field = image_field
        self._prompt_field, self._answer_field = prompt_field, answer_field
        self._fields = fields_read(scorer, prompt_field, answer_field)
        self._scorer = make_scorer(scorer, answer_field=answer_field)

    async def setup(self, seed: int, options: Info) -> Ask:
        """Return the question.

        Raises: DataError if the row does not exist, or is not a question.
        """
        # In a thread: the first call reads the whole file, and the loop serves all other episodes
        # meanwhile.
        rows = await asyncio.to_thread(read_prompts, self._data, self._fields)
        number = options.get("row", seed % len(rows))
        # a whole number of any type, NumPy's as well
        if not isinstance(number, SupportsIndex) or not 0 <= operator.index(number) < len(rows):
            raise DataError(
                f"row {number!r} of {self._data}, expected a number from 0 to {len(rows) - 1}"
            )
        number = operator.index(number)
        self._number, self._row = number, rows[number]
        return Ask(
            await asyncio.to_thread(
                row_messages,
                self._row,
                self._prompt_field,
                self._system,
                f"row {number} of {self._data}",
                self._image_field,
                Path(self._data).parent,
            )
        )

    async def reply(self, text: str) -> Done:
        """Score the answer.

        Raises: DataError if the scorer cannot compare with the row's answer.
        """
        try:
            score = await self._scorer(self.sandbox, text, self._row)
        except DataError as error:
            raise DataError(
                f"{self._answer_field!r} of row {self._number} of {self._data}: {error}"
            ) from error
        info = {"score": score.value, "scorer_fault": score.fault, "scorer_words": score.words}
        return Done(score.value, score.value >= self._success_at, info=info)


class SearchTask(QuestionTask):
    """A question whose answer is in documents that a tool searches.

    Args:
        data, scorer, prompt_field, answer_field, system: as in `QuestionTask`.
        documents: a `.parquet` or `.jsonl` file with `text` and, optionally, `title` in every row.
        max_turns: largest number of replies in an episode, including searches.
        max_results: largest number of documents that one search returns.
    """

    def __init__(
        self,
        data: str,
        documents: str,
        scorer: str = "match",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        system: str = "",
        max_turns: int = 8,
        max_results: int = 3,
    ) -> None:
        super().__init__(data, scorer, prompt_field, answer_field, system)
        self.limits = TextLimits(max_turns=max_turns)
        self._documents, self._max_results = documents, max_results
        self._index: SearchIndex | None = None

    async def setup(self, seed: int, options: Info) -> Ask:
        """Open the index and return the question."""
        self._index = await asyncio.to_thread(open_index, self._documents)
        return await super().setup(seed, options)

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """Return the search tool."""
        return (self.search,)

    async def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: a few words that the document should have.
        """
        assert self._index is not None
        found = await asyncio.to_thread(self._index.search, query, self._max_results)
        return "\n\n".join(document.as_text() for document in found) or "nothing was found"


_INDEXES: Final[dict[tuple[str, int], "SearchIndex"]] = {}
_INDEX_LOCK: Final = threading.Lock()


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a search.

    Example:
        Document(row=17, score=4.2, title="Ohm's law", text="The current through a conductor ...")
    """

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
        # Imported here, because searches alone need it.
        import bm25s

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
        "" if title is None else require_text(title, f"'title' of row {number}"),
        require_text(text, f"'text' of row {number}"),
    )


def open_index(path: str | Path) -> SearchIndex:
    """Return the index of a file of documents; built once, from any thread.

    Raises: DataError; ConfigError.
    """
    path = Path(path)
    rows = read_prompts(path, ("text",))
    key = (str(path.resolve()), path.stat().st_mtime_ns)
    # Episodes that start together ask for the same index; one of them builds it.
    with _INDEX_LOCK:
        if key not in _INDEXES:
            try:
                _INDEXES[key] = SearchIndex(rows)
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
        return _INDEXES[key]
