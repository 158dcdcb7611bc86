"""Prompts of pi0 and pi0.5, from instruction and state to PaliGemma's tokens.

    pi0              pick up the bowl\\n
    pi0.5            Task: pick up the bowl, State: 12 200 131;\\nAction:      (state in 256 bins from -1 to 1)

openpi cleans the instruction of underscores and line breaks under both models, LeRobot under pi0.5 alone
(openpi's `PaligemmaTokenizer`, LeRobot's `Pi0NewLineProcessor`).
"""

import logging
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.normalization import Project
from vla_rl.models.flow.pi import PiKind
from vla_rl.models.tensor_reading import HUB_ID, download

TOKENIZER_FILE: Final = "tokenizer.json"
PROMPT_LENGTHS: Final[dict[PiKind, int]] = {"pi0": 48, "pi05": 200}
"""Most tokens of a prompt."""

PALIGEMMA: Final = "google/paligemma-3b-pt-224"
"""Hub id of the tokenizer that both projects name."""

BIN_EDGES: Final = np.linspace(-1.0, 1.0, 257)[:-1]
PAD_ID: Final = 0
CACHE_SIZE: Final = 1024
"""Prompts whose ids are kept; pi0.5's hold the state, so they rarely repeat."""

_log = logging.getLogger(__name__)


def clean_instruction(instruction: str) -> str:
    """Return an instruction as openpi cleans it."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def format_pi0(instruction: str, project: Project) -> str:
    """Return pi0's prompt, which ends with one line break."""
    if project == "openpi":
        return f"{clean_instruction(instruction)}\n"
    return instruction if instruction.endswith("\n") else f"{instruction}\n"


def format_pi05(instruction: str, state: np.ndarray) -> str:
    """Return pi0.5's prompt.

    Args:
        instruction: the task in words.
        state: normalised, without padding; float [D]. Numbers below -1 become bin -1.
    """
    bins = np.digitize(state, BIN_EDGES) - 1
    written = " ".join(map(str, bins))
    return f"Task: {clean_instruction(instruction)}, State: {written};\nAction: "


class PiTokenizer:
    """PaliGemma's tokenizer, and the longest prompt; immutable.

    Args:
        tokenizer: adds the first token of a text by itself.
        max_length: most tokens; what is longer is cut at the end, with one line in the log.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self.max_length = tokenizer, max_length
        self._encode = lru_cache(maxsize=CACHE_SIZE)(self._encode_text)

    def encode(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int64 [B, T] and a mask bool [B, T], padded on the right to a multiple of 8."""
        rows = [self._encode(prompt) for prompt in prompts]
        # A row does not depend on its padding; few widths keep compiled and recorded shapes few.
        width = min(self.max_length, -(-max(map(len, rows)) // 8) * 8)
        ids = np.full((len(rows), width), PAD_ID, np.int64)
        mask = np.zeros((len(rows), width), bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, True
        return ids, mask

    def _encode_text(self, prompt: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(prompt).ids
        if len(ids) > self.max_length:
            _log.warning(
                "a prompt has %d tokens and is cut to %d, as it was in training: %.80r",
                len(ids),
                self.max_length,
                prompt,
            )
        return tuple(ids[: self.max_length])


def read_tokenizer(folder: Path, named: str | None, vocabulary: int) -> Tokenizer:
    """Read the tokenizer of a folder: its own `tokenizer.json`, else that of the folder or hub id that
    is named, else PaliGemma's from the hub.

    Args:
        folder: the checkpoint.
        named: another folder, or a hub id.
        vocabulary: rows of the table of tokens.

    Raises: CheckpointError if it cannot be read, or has ids that the table does not have.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        path = find_tokenizer_folder(folder, named or PALIGEMMA) / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library has no narrower exception
        raise CheckpointError(
            f"{path} is not a tokenizer: {error}; copy the tokenizer.json of its language model into {folder}."
        ) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    # PaliGemma's own has ids of 64 unused tokens behind the table that openpi's networks keep
    if largest >= max(vocabulary, 1) + 64 or not tokenizer.encode("a").ids:
        raise CheckpointError(
            f"{path} has ids up to {largest}, expected none beyond the {vocabulary} rows of the "
            "network's table of tokens; it belongs to another policy."
        )
    return tokenizer


def find_tokenizer_folder(folder: Path, named: str) -> Path:
    """Return the folder of a tokenizer that a checkpoint names, downloaded if it is a hub id.

    Raises: CheckpointError if it is neither a folder nor a hub id, or cannot be fetched.
    """
    if Path(named).is_dir():
        return Path(named)
    if HUB_ID.fullmatch(named):
        try:
            return download(named, without=("*.safetensors", "*.index.json"))
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder} has no {TOKENIZER_FILE}, and that of {named} cannot be fetched; copy "
                f"it into the folder. {error}"
            ) from error
    raise CheckpointError(
        f"{folder} has no {TOKENIZER_FILE} and names {named!r}, which is no folder here; copy "
        f"that of its language model into it."
    )
