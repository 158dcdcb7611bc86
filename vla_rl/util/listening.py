"""Settings of a program that listens: who reaches its address, and TLS."""

import ipaddress
import ssl

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
