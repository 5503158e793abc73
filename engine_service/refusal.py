"""An engine's no to one request."""

from __future__ import annotations

from shared.messages import RejectCode


class Refusal(Exception):  # noqa: N818 - an answer to one request, not a failure of the engine
    """The engine will not run a request. `param` names the field of the request that is at fault."""

    def __init__(self, code: RejectCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: RejectCode = code
        self.message = message
        self.param = param
