"""One method of one URL, as far as a client has to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway.dialect import OPENAI
from gateway.openapi.answers.errors import ErrorAnswer


class Access(Enum):
    """Whose secret is asked for."""

    OPEN = "open"
    KEY = "key"  # of a tenant
    ADMIN = "admin"  # the operator's token


# What a route can answer instead of what it is for. 500 is missing on purpose: it is always a fault of ours.
KEY_ERRORS = (401, 403, 429, 503)  # 429: too many unknown keys from there; 503: keys cannot be looked up
BODY_ERRORS = (400, 408, 413, 415)
TEXT_ERRORS = (*BODY_ERRORS, *KEY_ERRORS, 404)  # of what counts as a request of a model's
MODEL_ERRORS = (*TEXT_ERRORS, 502, 504)  # of all that has an engine work


@dataclass(frozen=True, slots=True)
class Operation:
    """`path` is aiohttp's template without patterns, and `aliases` are others that mean the same. `body`: its
    type, or a union of types. `answers`: the type of the JSON of each good status, or of 503 where a probe
    says more than an error does; `texts`: those that are plain text."""

    method: str
    path: str
    operation_id: str
    tag: str
    summary: str
    access: Access = Access.KEY
    aliases: Sequence[str] = ()
    body: Any = None
    may_lack_body: bool = False
    streams: bool = False  # if the body has `"stream": true`
    parameters: Mapping[str, str] = field(default_factory=dict)  # those in the path, and what they are
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # their names and JSON schemas
    answers: Mapping[int, Any] = field(default_factory=dict)
    texts: Sequence[int] = ()
    errors: Sequence[int] = ()
    error: Any = ErrorAnswer
    id_headers: Sequence[str] = OPENAI.id_headers  # of every answer
