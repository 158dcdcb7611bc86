"""Small files of a saved checkpoint: those of the loaded folder, unchanged, and ours
beside them.
"""

from typing import Any, Final

from tokenizers import Tokenizer

from vla_rl.errors import ConfigError
from vla_rl.models.prismatic.config import PrismaticConfig, ProprioConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.public_config import (
    CONFIG_FILE,
    EXTENSION_FILE,
    TOKENIZER_FILE,
    Extension,
    as_text,
    public_config,
)

BOS_ID: Final = 1
"""First token of every prompt."""


def read_tokenizer(config: PrismaticConfig) -> Tokenizer:
    """Read a policy's tokenizer.

    Raises: ConfigError if its file is not a tokenizer, or does not fit the policy's tokens.
    """
    file, llm = config.tokenizer_file, config.llm
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the tokenizers library has no narrower exception
        raise ConfigError(
            f"tokenizer_file is {file!r}, expected a tokenizer.json: {error}"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # the public ones hold the padding token too, the first id after the vocabulary
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > llm.pad_token_id:
        raise ConfigError(
            f"tokenizer_file is {file!r}, which has ids up to {largest}, expected none beyond "
            f"{llm.pad_token_id}: {llm.vocab_size} tokens, of which the last are actions, and one "
            "for padding. It belongs to another policy."
        )
    if tokenizer.encode("").ids[:1] != [BOS_ID]:
        raise ConfigError(
            f"tokenizer_file is {file!r}, whose prompts do not begin with <s> (id {BOS_ID}), "
            "expected one that adds it."
        )
    return tokenizer


def checkpoint_files(
    config: PrismaticConfig,
    extension: Extension,
    tokenizer: Tokenizer,
    origin: PublicFolder | None,
    proprio: ProprioConfig | None = None,
) -> dict[str, bytes]:
    """Return the files beside the weights.

    Args:
        config: the policy's configuration.
        extension: settings that the public `config.json` lacks.
        tokenizer: written if the loaded folder had none.
        origin: folder that the policy was loaded from; None for one that was made here.
        proprio: scaling of proprioception, for a policy that was made here.
    """
    files = {} if origin is None else dict(origin.files)
    if TOKENIZER_FILE not in files:
        files[TOKENIZER_FILE] = tokenizer.to_str(pretty=True).encode()
    if CONFIG_FILE not in files:
        files[CONFIG_FILE] = as_text(public_config(config, _statistics(config, proprio), proprio))
    if extension != Extension():
        files[EXTENSION_FILE] = as_text(extension)
    return files


def _statistics(config: PrismaticConfig, proprio: ProprioConfig | None) -> dict[str, Any]:
    bounds = config.action_bounds
    statistics: dict[str, Any] = {
        "action": {"q01": bounds.low, "q99": bounds.high, "mask": bounds.is_scaled}
    }
    if proprio is not None:
        statistics["proprio"] = {"q01": proprio.low, "q99": proprio.high}
    return {config.norm_key: statistics}
