"""Tokens that clients show to a server, read from files: other users see a command line."""

from pathlib import Path
from typing import Final

from vla_rl.errors import ConfigError

MIN_TOKEN: Final = 16
"""Characters below which a token could be guessed."""


def read_token(file: str | None) -> str | None:
    """Return the token in a file, or None without a file. Raises: ConfigError."""
    if file is None:
        return None
    try:
        token = Path(file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file {file} cannot be read: {error}") from error
    # a header holds nothing else
    if not token.isprintable() or len(token) < MIN_TOKEN:
        raise ConfigError(
            f"token_file {file} holds no good token, expected one line of at least {MIN_TOKEN} "
            "printable characters, such as that of `openssl rand -hex 32`"
        )
    return token
