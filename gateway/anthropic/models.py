"""Models in Anthropic's shape, for its clients, which ask for them at the same URL as OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VERSION_HEADER = "anthropic-version"  # its clients send it with every request
UNKNOWN_TIME = "1970-01-01T00:00:00Z"  # as Anthropic has it where it knows none


def is_of_anthropics_client(headers: Mapping[str, str]) -> bool:
    return VERSION_HEADER in headers


def model_info(name: str, max_model_len: int | None) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
    }


def model_page(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of them are on the one page, whatever `limit` says."""
    ids = [info["id"] for info in infos]
    return {
        "data": infos,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
