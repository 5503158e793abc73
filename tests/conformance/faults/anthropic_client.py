"""Faults that Anthropic's client meets."""

from __future__ import annotations

from tests.conformance.faults.planted import Planted, at, loses_a_piece

FAULTS: list[Planted] = [
    loses_a_piece(
        "messages of the official client",
        at("/v1/messages", max_tokens=20),
        "anthropic-client.a-message-is-streamed-as-it-is-whole",
    ),
]
