"""Errors that a user can cause, with the field they are about."""

from __future__ import annotations


class UserError(Exception):
    """Something the user sent or configured is wrong.

    `param` names the field as the user wrote it (e.g. `messages[2].role`), or is None when the
    request as a whole is meant.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(UserError):
    """headrace.toml, a flag or an environment variable is wrong."""


class InvalidRequest(UserError):  # noqa: N818 - reads as the thing that is raised
    """A request field has a value that can never work."""
