"""Bodies that are right, for each URL that takes one; and where in them something else could stand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]  # the path to a value inside a document

_USER = {"role": "user", "content": "hi"}
_FUNCTION = {
    "name": "f",
    "description": "It does.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CHAT = {"model": "fake", "messages": [_USER], "max_tokens": 2, "seed": 1}
_CHATS: list[dict[str, Any]] = [
    _CHAT,
    _CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    _CHAT | {"messages": [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                          {"role": "tool", "tool_call_id": "c", "content": "2"}]},
    _CHAT | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1},
    _CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    _CHAT | {"structured_outputs": {"choice": ["a", "b"]}, "metadata": {"a": "b"}, "logit_bias": {"65": 1}},
]  # fmt: skip
_TOOL_CHATS = [_CHAT | {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}]
_COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 2, "seed": 1}
_COMPLETIONS: list[dict[str, Any]] = [
    _COMPLETION,
    _COMPLETION | {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1, "prompt_logprobs": 1, "stop": ["x"]},
    _COMPLETION | {"prompt": [65, 66], "stream": True, "n": 2},
    _COMPLETION | {"prompt": [[65], [66, 67]], "structured_outputs": {"regex": "[a-c]"}},
]
_SCORES: list[dict[str, Any]] = [
    {"model": "embedder", "text_1": "hi", "text_2": ["ho", "hu"]},
    {"model": "embedder", "queries": ["hi", "ha"], "documents": ["ho", "hu"]},
]
_RERANKS: list[dict[str, Any]] = [
    {"model": "embedder", "query": "hi", "documents": ["ho", {"text": "hu"}], "top_n": 1},
]
_TOKENIZE: list[dict[str, Any]] = [
    {"model": "fake", "prompt": "hi", "return_token_strs": True},
    {"model": "fake", "messages": [_USER]},
]
_RESPONSE = {"model": "fake", "input": "hi", "max_output_tokens": 2, "seed": 1}
_RESPONSES: list[dict[str, Any]] = [
    _RESPONSE,
    _RESPONSE | {"input": [_USER, {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    _RESPONSE | {"input": [_USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "c", "output": "2"}]},
    _RESPONSE | {"text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}},
    _RESPONSE | {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                 "tool_choice": "none", "store": False},
    _RESPONSE | {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
]  # fmt: skip
_ANTHROPIC_TOOL = {"name": "f", "description": "It does.", "input_schema": {"type": "object"}}
_COUNT = {"model": "fake", "messages": [_USER]}
_COUNTS: list[dict[str, Any]] = [
    _COUNT,
    _COUNT
    | {"system": "Be kind.", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
]
_MESSAGES: list[dict[str, Any]] = [each | {"max_tokens": 2} for each in _COUNTS] + [
    _COUNT | {"max_tokens": 2, "stream": True, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3},
]

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [*_CHATS, *_TOOL_CHATS],
    "/v1/completions": _COMPLETIONS,
    "/v1/embeddings": [
        {"model": "embedder", "input": "hi", "encoding_format": "float"},
        {"model": "embedder", "input": ["hi", "ho"], "encoding_format": "base64"},
        {"model": "embedder", "input": [65, 66], "user": "u"},
        {"model": "embedder", "input": [[65], [66, 67]]},
    ],
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES[:2],
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _COUNTS,
    "/v1/chat/completions/render": _CHATS,
    "/v1/completions/render": _COMPLETIONS,
    "/tokenize": _TOKENIZE,
    "/detokenize": [{"model": "fake", "tokens": [65, 66]}],
    "/v1/score": _SCORES,
    "/v1/rerank": _RERANKS,
    "/v1/feedback": [
        {"response_id": "chatcmpl-0", "score": 1},
        {"response_id": "chatcmpl-0", "score": -0.5, "comment": "too long"},
    ],
    "/admin/prefix-cache/reset": [{"model": "fake"}, {}],
    "/admin/keys": [
        {"tenant": "default", "name": "of the shop", "not_after": "2100-01-01T00:00:00Z"},
        {"tenant": "default", "models": ["fake"], "cidrs": ["10.0.0.0/8"], "limits": {"tokens_per_day": 2}},
    ],
    "/admin/keys/{key_id}": [{"name": "other", "limits": None}],
    "/admin/keys/{key_id}/rotate": [{"overlap_s": 3600.5}, {}],
    "/admin/tenants/{name}": [
        {"requests_per_minute": 60, "models": ["fake"], "priority": "batch"},
        {"name": "example", "route_limits": {"fake": {"max_concurrency": 2}}, "shadow": ["max_concurrency"]},
    ],
    "/admin/routes/{name}": [
        {"split": [{"variant": "v", "model": "fake"}]},
        {
            "name": "example",
            "sticky": "key",
            "version": 2,
            "split": [
                {"variant": "v", "model": "fake", "weight": 0.5, "sampling": {"temperature": 0.5}},
                {"variant": "w", "model": "fake", "system_prompt": "Be kind."},
            ],
            "fallback": ["w"],
            "shadow": {"variant": "w", "percent": 10},
        },
    ],
}


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """Of every value inside a document, the document itself excepted."""
    if place:
        yield place
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places_in(inner, (*place, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places_in(inner, (*place, index))


def with_value_at(document: Any, place: Place, value: Any) -> Any:
    """A copy of the document with another value, or one more field, at that place."""
    changed = copy.deepcopy(document)
    target = changed
    for part in place[:-1]:
        target = target[part]
    target[place[-1]] = value
    return changed
