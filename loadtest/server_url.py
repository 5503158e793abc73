"""URLs of servers as users write them: taken apart, and never shown with a password.

Imports nothing heavy: the command line is built from it.
"""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote, urlsplit

from shared.errors import ConfigError

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_ALL_BEFORE_AT = re.compile(r"(?<=://).*@", re.DOTALL)  # a password with a / in it makes a URL that is none


def check_server_url(url: str, flag: str) -> None:
    """Raises ConfigError unless it is an http URL of a host and, if any, a port that can exist."""
    shown = _ALL_BEFORE_AT.sub("", url)
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:  # UnicodeError, of a host name, is one
        why = "" if "@" in url else f": {error}"  # which may quote a piece of the password
        raise ConfigError(f"{shown!r} is not an http URL{why}", flag) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{shown!r} is not an http URL", flag)
    if port == 0:
        raise ConfigError(f"{shown!r}: there is no port 0", flag)
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(f"{shown!r} holds a space or a control character", flag)


def without_credentials(text: str) -> str:
    """The text, a URL or one that holds some, without `user:password@`."""
    return _CREDENTIALS.sub("", text)


def basic_authorization(url: str) -> str | None:
    """The header's value for the credentials in the URL; None: it has none. The URL must be one."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
