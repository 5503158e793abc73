"""What `headrace up` says: a line to paste that works for the models there are."""

from __future__ import annotations

import json
import shlex

import pytest

from compose.greeting import greeting
from compose.run_directory import ServicePids, StackRecord

STACK = StackRecord(
    "http://127.0.0.1:8080", "hr-key", "admin", "redis://", "n", ServicePids(1, 2, 3, {}), [], "/"
)


@pytest.mark.parametrize(
    ("models", "path", "model"),
    [
        ({"writer": "generate", "vectors": "pooling"}, "/v1/chat/completions", "writer"),
        ({"vectors": "pooling", "writer": "generate"}, "/v1/chat/completions", "writer"),
        ({"vectors": "pooling"}, "/v1/embeddings", "vectors"),
    ],
)
def test_the_curl_line_is_for_a_model_that_writes_if_there_is_one(
    models: dict[str, str], path: str, model: str
) -> None:
    text = greeting(STACK, models, 1.0, None)
    [line] = [line for line in text.splitlines() if line.lstrip().startswith("curl")]
    arguments = shlex.split(line)
    assert arguments[1] == f"http://127.0.0.1:8080{path}"
    assert json.loads(arguments[-1])["model"] == model
    assert "first token" not in text
