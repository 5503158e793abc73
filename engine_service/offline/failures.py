"""What a user of the offline classes may have to catch, beside ValueError and ConfigError."""

from __future__ import annotations

from collections.abc import Sequence

from engine_service.offline.request_output import RequestOutput


class EngineFailedError(RuntimeError):
    """A step failed, or the engine was shut down. Nothing more can be computed with it."""


class GenerationError(ValueError):
    """Requests failed that had looked right: a grammar that does not compile, for example.

    `outputs` are those of all requests, in input order; the ones that failed have an `error`.
    """

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs = list(outputs)
        failed = [(index, output.error) for index, output in enumerate(outputs) if output.error is not None]
        assert failed, "an error needs a failed output"
        index, reason = failed[0]
        super().__init__(
            f"{len(failed)} of {len(self.outputs)} requests failed, first prompts[{index}]: {reason} "
            "(this exception's `outputs` has the others)"
        )
