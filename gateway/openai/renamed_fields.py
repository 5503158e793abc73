"""Refusals in the words of an interface whose requests have become chat completions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from gateway.errors import ApiError, from_user_error
from shared.errors import UserError


class RenamedFields:
    """Fields of chat completions, as patterns, and which of the interface's have become them. The first
    pattern that is the whole of a name counts; fields that none is about have the same name in both.
    """

    def __init__(self, *renamed: tuple[str, str]) -> None:
        self._renamed = [(re.compile(pattern), ours) for pattern, ours in renamed]

    @contextlib.contextmanager
    def in_our_words(self) -> Iterator[None]:
        """What the chat refuses inside is refused with the field of the interface that is meant."""
        try:
            yield
        except (ApiError, UserError) as error:
            renamed = self.renamed(error)
            if renamed is error:
                raise
            raise renamed from error

    def renamed(self, error: ApiError | UserError) -> ApiError:
        """The same refusal, under the name of the interface's field."""
        if isinstance(error, UserError):
            error = from_user_error(error)
        for pattern, ours in self._renamed:
            if error.param is not None and (match := pattern.fullmatch(error.param)):
                return _under_another_name(error, error.param, match.expand(ours))
        return error


def _under_another_name(error: ApiError, theirs: str, ours: str) -> ApiError:
    """In its message, too, at the first place where the name stands by itself."""
    mentioned = rf"(?<![\w.]){re.escape(theirs)}(?![\w\[])"
    return ApiError(
        error.status,
        re.sub(mentioned, lambda _: ours, error.message, count=1),
        kind=error.kind,
        code=error.code,
        param=ours,
        retry_after_s=error.retry_after_s,
        headers=error.extra_headers,
    )
