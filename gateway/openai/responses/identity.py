"""Ids of responses and of the items in them. An item's id tells the response that it was first part of."""

from __future__ import annotations

import re
from typing import Literal

from shared.identifiers import fresh_request_id

ItemPrefix = Literal["msg", "rs", "fc", "fco"]
RESPONSE_PREFIX = "resp_"

_HEX_DIGITS = 24
_RESPONSE_ID = re.compile(rf"resp_([0-9a-f]{{{_HEX_DIGITS}}})")
_ITEM_ID = re.compile(rf"[a-z]{{2,4}}_([0-9a-f]{{{_HEX_DIGITS}}})[0-9a-f]{{4,}}")


def fresh_response_id() -> str:
    return RESPONSE_PREFIX + fresh_request_id()


def is_response_id(text: str) -> bool:
    """Whether it could be one of ours: anything else is not looked for."""
    return _RESPONSE_ID.fullmatch(text) is not None


def item_id(prefix: ItemPrefix, response_id: str, number: int) -> str:
    """`number`: of the item, among all that this response brings: its input first, then its output."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}{number:04x}"


def response_of_item(text: str) -> str | None:
    """The response that an item with this id was first part of; None: the id is not one of ours."""
    match = _ITEM_ID.fullmatch(text)
    return RESPONSE_PREFIX + match[1] if match else None
