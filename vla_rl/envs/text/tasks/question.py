"""A question from a data set, an answer, a score.

It is single-turn, or with a search tool in as many turns as it takes.
"""

import asyncio
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from vla_rl.datasets.prompt_messages import first_messages
from vla_rl.datasets.prompts import read_prompts
from vla_rl.envs.text.limits import TextLimits
from vla_rl.envs.text.search import SearchIndex, open_index
from vla_rl.envs.text.task import Ask, Done, TextTask
from vla_rl.errors import DataError
from vla_rl.scoring import make_scorer
from vla_rl.types import Info


class QuestionTask(TextTask):
    """One row of a data set, rewarded with its score.

    `options={"row": 17}` selects it, or else the seed.

    Args:
        data: a `.parquet` or `.jsonl` file (see `vla_rl.datasets.prompts`).
        scorer: `exact`, `match`, `math`, `code`, or `module:function` (see `vla_rl.scoring`).
        prompt_field: column of the question: a text, or a list of messages with `role` and
            `content` (see `vla_rl.datasets.prompt_messages`).
        answer_field: column that the scorer compares with; for `code`, a list of tests
            `{"stdin": ..., "stdout": ...}`.
        system: system message at the start, for example the expected format of an answer.
        success_at: lowest score that counts as success.
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
    ) -> None:
        self._data, self._system, self._success_at = data, system, success_at
        self._fields = (prompt_field, answer_field)
        self._scorer = make_scorer(scorer, answer_field=answer_field)

    async def setup(self, seed: int, options: Info) -> Ask:
        """Return the question.

        Raises: DataError if the row does not exist, or is not a question.
        """
        rows = await asyncio.to_thread(read_prompts, self._data, self._fields)
        number = options.get("row", seed % len(rows))
        # a whole number of any type, NumPy's as well
        if not isinstance(number, SupportsIndex) or not 0 <= operator.index(number) < len(rows):
            raise DataError(
                f"row {number!r} of {self._data}, expected a number from 0 to {len(rows) - 1}"
            )
        number = operator.index(number)
        self._number, self._row = number, rows[number]
        label = f"{self._fields[0]!r} of row {number} of {self._data}"
        return Ask(first_messages(self._row[self._fields[0]], self._system, label))

    async def reply(self, text: str) -> Done:
        """Score the answer.

        Raises: DataError if the scorer cannot compare with the row's answer.
        """
        try:
            score = await self._scorer(self.sandbox, text, self._row)
        except DataError as error:
            raise DataError(
                f"{self._fields[1]!r} of row {self._number} of {self._data}: {error}"
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
