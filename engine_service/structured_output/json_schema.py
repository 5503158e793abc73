"""A JSON schema, made ready for the grammar library.

The library enforces less than a schema says in three places, without a word about it. Here they are
mended, or the schema is refused where `strict` promises that all of it is enforced.

- `date` and `date-time`: 29 February of every year is a date to it. A pattern leaves the real ones.
- `oneOf` is no more than `anyOf`. See exclusive_alternatives.py.
- `minProperties` counts a name that comes twice as two.

And it refuses some words that say nothing: `propertyNames` that are strings, as all names are (each
record of zod's), and beside a reference in a circle an annotation that is not JSON Schema's own (each
recursive union of pydantic's). They are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine_service.structured_output.exclusive_alternatives import make_alternatives_exclusive
from engine_service.structured_output.grammar import refused

# Under the first, data stands and no schemas; under the second, schemas under names of the client's.
_DATA_KEYWORDS = ("const", "enum", "default", "examples")
_NAMING_KEYWORDS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
)

# OpenAPI's, which pydantic writes too, and editors'. They say nothing about what is valid.
_FOREIGN_ANNOTATIONS = ("discriminator", "markdownDescription", "nullable", "example", "externalDocs", "xml")
_REFERRING_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf")

# Beside a pattern for dates that knows the lengths of all months but February. Nor is there a year 0
# for most programs that are to read the date, though RFC 3339 has one.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # 2024, 2000
_REAL_DATE = f"^(?:{_YEAR}-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"

_LARGEST_EXACT_INTEGER = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ReadySchema:
    text: str
    has_exclusive_alternatives: bool  # each `oneOf` allows what it would allow as `anyOf`


def make_ready(text: str, *, is_strict: bool) -> ReadySchema:
    """Raises Refusal. A text that is no schema stays as it is, for the library to say what is wrong."""
    try:
        document = json.loads(text)
        schemas = list(schemas_in(document))
        has_exclusive_alternatives = make_alternatives_exclusive(document, schemas)
        for schema in schemas:
            _refuse_what_would_come_out_different(schema, is_strict=is_strict)
            _keep_to_real_dates(schema)
            _drop_what_says_nothing(schema)
            if is_strict and _counts_free_names(schema):
                raise refused(
                    "minProperties cannot be enforced where names are free, since one may come twice: "
                    "list the names under properties, or leave strict out"
                )
        return ReadySchema(json.dumps(document), has_exclusive_alternatives)
    except (ValueError, RecursionError):  # the library takes 128 levels, and Python more
        return ReadySchema(text, has_exclusive_alternatives=False)


def schemas_in(document: Any) -> Iterator[dict[str, Any]]:
    """The schemas in it, at any depth, and some objects that only look like one.

    Those are looked at, too, since a reference may make a schema of any object.
    """
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for keyword, value in node.items():
                if keyword in _NAMING_KEYWORDS and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in _DATA_KEYWORDS:
                    waiting.append(value)


def _refuse_what_would_come_out_different(schema: dict[str, Any], *, is_strict: bool) -> None:
    """The library counts in floating point, and control characters without a short escape are not written:
    another value would stand in the place of the one that is asked for. Raises Refusal."""
    fixed = [schema[keyword] for keyword in ("const", "enum") if keyword in schema]
    bounds = [schema[keyword] for keyword in _BOUNDS if keyword in schema] if is_strict else []
    waiting = [*fixed, *bounds]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and abs(value) > _LARGEST_EXACT_INTEGER:
            raise refused(f"{value} is beyond the integers that can be enforced, 2^53: use a string")
        elif isinstance(value, str) and _UNWRITTEN.search(value):
            raise refused(f"{value[:64]!r} has a control character that is not written")


def _keep_to_real_dates(schema: dict[str, Any]) -> None:
    if schema.get("format") not in ("date", "date-time"):
        return
    if "pattern" not in schema:
        schema["pattern"] = _REAL_DATE
    elif isinstance(conjunction := schema.setdefault("allOf", []), list):
        conjunction.append({"pattern": _REAL_DATE})


def _drop_what_says_nothing(schema: dict[str, Any]) -> None:
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if any(keyword in schema for keyword in _REFERRING_KEYWORDS):
        for keyword in _FOREIGN_ANNOTATIONS:
            schema.pop(keyword, None)


def _counts_free_names(schema: dict[str, Any]) -> bool:
    """Whether it wants more names that are not listed than one, which cannot be the same twice."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if not isinstance(least, (int, float)) or not isinstance(required, list):
        return False
    has_free_names = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return has_free_names and least > len(required) + 1
