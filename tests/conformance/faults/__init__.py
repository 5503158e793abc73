"""The planted faults, each one that a real server has had or could have, and the rows that it must fail."""

from __future__ import annotations

from tests.conformance.faults import (
    anthropic_client,
    back_pressure,
    chat,
    completions,
    connections,
    cross_origin,
    embeddings,
    errors,
    headers,
    messages,
    messages_tools,
    models,
    openai_client,
    openapi,
    rendering,
    responses,
    responses_tools,
    sampling,
    scores,
    streams,
    structured_output,
    tokens,
    tools,
)
from tests.conformance.faults.planted import Planted

MODULES = (
    models, chat, streams, completions, sampling, structured_output, tools, responses, responses_tools,
    messages, messages_tools, embeddings, scores, tokens, rendering, errors, headers, connections,
    back_pressure, cross_origin, openapi, openai_client, anthropic_client,
)  # fmt: skip
FAULTS: list[Planted] = [fault for module in MODULES for fault in module.FAULTS]
