"""Who runs a command, for the audit. Nobody checks it."""

from __future__ import annotations

import getpass
import socket


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user often has no name
        return "somebody"


def actor_headers() -> dict[str, str]:
    """As the admin API wants it."""
    actor = f"{user_name()}@{socket.gethostname()}"
    return {"x-headrace-actor": actor.encode("ascii", "replace").decode()}
