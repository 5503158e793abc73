"""What `headrace up` says when the stack is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from compose.gateway_client import first_writer
from compose.run_directory import StackRecord

WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
QUESTION = "Why is the sky blue?"


def greeting(
    stack: StackRecord, models: Mapping[str, str], ready_after_s: float, first_token: str | None
) -> str:
    """`models`: the names that the demo key may use, and their runners. `first_token`: None: none writes."""
    first_token_said = f"; time to first token: {first_token}" if first_token is not None else ""
    lines = [
        "",
        f"Headrace is ready after {ready_after_s:.1f} s{first_token_said}",
        "",
        f"  URL      {stack.url}/v1",
        f"  key      {stack.demo_key}",
    ]
    if models:
        lines += [f"  models   {', '.join(models)}", "", f"  {_curl(stack, models)}"]
    return "\n".join([*lines, "", "Ctrl-C finishes running requests and stops everything.", ""])


def url_to_dial(url: str) -> str:
    """The address under which a server that listens on every interface is reached from here."""
    parts = urlsplit(url)
    host = WILDCARD_HOSTS.get(parts.hostname or "")
    return url if host is None else urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def _curl(stack: StackRecord, models: Mapping[str, str]) -> str:
    """One line that works when pasted into a shell: for the first model that writes, if one does."""
    writer = first_writer(models)
    body: dict[str, Any]
    if writer is not None:
        path = "/v1/chat/completions"
        body = {"model": writer, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    else:
        path, body = "/v1/embeddings", {"model": next(iter(models)), "input": QUESTION}
    arguments = [
        "curl",
        f"{stack.url}{path}",
        "-H", f"Authorization: Bearer {stack.demo_key}",
        "-H", "Content-Type: application/json",
        "-d", json.dumps(body),
    ]  # fmt: skip
    return shlex.join(arguments)
