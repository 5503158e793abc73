"""Faults of answers that should keep to a form."""

from __future__ import annotations

from typing import Any

from tests.conformance.faults.planted import CHAT, Planted, at, takes, tells
from tests.conformance.wrong_server import Asked


def content(change: Any) -> Any:
    """Changes the content of whole answers."""

    def changed(document: dict[str, Any]) -> None:
        for choice in document["choices"]:
            choice["message"]["content"] = change(choice["message"]["content"])

    return changed


def has_form(kind: str, name: str = "thing") -> Any:
    def holds(asked: Asked) -> bool:
        form = asked.document.get("response_format")
        if not at(CHAT)(asked) or not isinstance(form, dict) or form.get("type") != kind:
            return False
        return kind != "json_schema" or (form.get("json_schema") or {}).get("name") == name

    return holds


FAULTS: list[Planted] = [
    tells(
        "an object is a list",
        has_form("json_object"),
        content(lambda text: "[1]"),
        "structured-output.json-object-is-an-object",
    ),
    tells(
        "a schema is a hint",
        lambda asked: has_form("json_schema")(asked) and asked.document["temperature"] == 1,
        content(lambda text: text.replace('"count"', '"number"')),
        "structured-output.a-schema-is-kept",
    ),
    tells(
        "only whole answers are laid out",
        lambda asked: has_form("json_schema")(asked) and asked.document["temperature"] == 0,
        content(lambda text: text.replace(":", ": ") + "\n"),
        "structured-output.a-stream-keeps-it-too",
    ),
    takes(
        "a schema that is none",
        has_form("json_schema", "x"),
        "structured-output.a-schema-that-is-none-is-refused",
    ),
    takes("a form that is none", has_form("yaml"), "structured-output.a-format-that-is-none-is-refused"),
    tells("text is a form", has_form("text"), content(str.upper), "structured-output.text-is-no-form"),
    tells(
        "a regex holds for the begin only",
        lambda asked: at(CHAT)(asked) and b'"regex"' in asked.body,
        content(lambda text: text + "!"),
        "structured-output.a-regex-is-matched",
    ),
    tells(
        "a choice is quoted",
        lambda asked: at(CHAT)(asked) and b'"choice"' in asked.body,
        content(lambda text: f'"{text}"'),
        "structured-output.a-choice-is-made",
    ),
]
