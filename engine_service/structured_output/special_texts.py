"""Forms that would have the text of a special token in the output.

Where only one text can follow, the grammar library tokenises it as a prompt is tokenised: the text of a
special token becomes that token, which is no text and may end the sequence. So such forms are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from engine_service.structured_output.grammar import refused
from engine_service.structured_output.json_schema import schemas_in
from shared.sampling import StructuredOutput

_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')


def special_texts(tokenizer_json: bytes) -> tuple[str, ...]:
    """Of a tokenizer in the form of TextBundle's: what its special tokens are called."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    return tuple(token["content"] for token in added if token.get("special") and token["content"])


def refuse_special_texts(form: StructuredOutput, schemas: Iterator[str], texts: Collection[str]) -> None:
    """`schemas`: those that the form has. Raises Refusal."""
    wanted = form.text.replace("\\", "") if form.kind in ("regex", "choice") else ""
    if form.kind == "grammar":  # where a special token may stand by itself, but not in a text
        wanted = "\n".join(_LITERAL.findall(form.text))
    for schema in schemas:
        wanted += "\n".join(_forced_strings(schema))
    for text in texts:
        if text in wanted:
            raise refused(f"the {form.kind} asks for the text of the special token {text!r}, which is none")


def _forced_strings(schema: str) -> Iterator[str]:
    """Those that stand in the output as they stand in the schema."""
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError):
        return  # the library says what is wrong with it
    for each in schemas_in(document):
        properties = each.get("properties")
        forced: list[Any] = [each.get(word) for word in ("const", "enum", "pattern", "required")]
        forced += properties if isinstance(properties, dict) else []
        yield json.dumps(forced, ensure_ascii=False).replace("\\", "")
