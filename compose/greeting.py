"""What `headrace up` says when the stack is ready."""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit, urlunsplit

from compose.run_directory import StackRecord

WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
QUESTION = "Why is the sky blue?"


def greeting(stack: StackRecord, models: list[str], ready_after_s: float, first_token: str) -> str:
    """`models`: the names that the demo key may use."""
    lines = [
        "",
        f"Headrace is ready after {ready_after_s:.1f} s; time to first token: {first_token}",
        "",
        f"  URL      {stack.url}/v1",
        f"  key      {stack.demo_key}",
    ]
    if models:
        lines += [f"  models   {', '.join(models)}", "", f"  {_curl(stack, models[0])}"]
    return "\n".join([*lines, "", "Ctrl-C finishes running requests and stops everything.", ""])


def url_to_dial(url: str) -> str:
    """The address under which a server that listens on every interface is reached from here."""
    parts = urlsplit(url)
    host = WILDCARD_HOSTS.get(parts.hostname or "")
    return url if host is None else urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def _curl(stack: StackRecord, model: str) -> str:
    """One line that works when pasted into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    arguments = [
        "curl",
        f"{stack.url}/v1/chat/completions",
        "-H", f"Authorization: Bearer {stack.demo_key}",
        "-H", "Content-Type: application/json",
        "-d", json.dumps(body),
    ]  # fmt: skip
    return shlex.join(arguments)
