"""Settings of a program that listens: who reaches its address, TLS, and the token that clients show."""

import ipaddress
import os
import ssl
from pathlib import Path
from typing import Final

from vla_rl.errors import ConfigError


def is_local_address(host: str) -> bool:
    """Return whether only this machine can reach a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return a server's TLS settings, from PEM files, or None without a certificate.

    Raises: ConfigError if the files cannot be used.
    """
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_certificate {certificate} and tls_key {key} cannot be used: {error}"
        ) from error
    return context


MIN_TOKEN: Final = 16
"""Characters below which a token could be guessed."""


def read_token(file: str | None) -> str | None:
    """Return the token in a file, or None without a file.

    It is no option, because other users see a command line. Raises: ConfigError.
    """
    if file is None:
        return None
    try:
        token = Path(os.path.expanduser(file)).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file {file} cannot be read: {error}") from error
    # a header holds nothing else
    if not token.isprintable() or len(token) < MIN_TOKEN:
        raise ConfigError(
            f"token_file {file} holds no good token, expected one line of at least {MIN_TOKEN} "
            "printable characters, such as that of `openssl rand -hex 32`"
        )
    return token
