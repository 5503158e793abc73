"""Function-calling schemas as applications write them, each with arguments that a model could give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FunctionSchema:
    name: str
    schema: dict[str, Any]
    example: Any


def _function(
    name: str,
    properties: dict[str, Any],
    required: list[str],
    example: Any,
    *,
    definitions: dict[str, Any] | None = None,
    is_closed: bool = True,
) -> FunctionSchema:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if is_closed:
        schema["additionalProperties"] = False
    if definitions:
        schema["$defs"] = definitions
    return FunctionSchema(name, schema, example)


def _array(items: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def _enum(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def _one_of(kind: str, **properties: Any) -> dict[str, Any]:
    """A member of a union that a constant tells apart, as pydantic's discriminated unions are written."""
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **properties},
        "required": ["kind", *properties],
        "additionalProperties": False,
    }


STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
DATE: dict[str, Any] = {"type": "string", "format": "date"}
DATE_TIME: dict[str, Any] = {"type": "string", "format": "date-time"}

FUNCTION_SCHEMAS: tuple[FunctionSchema, ...] = (
    _function(
        "get_weather",
        {"location": {**STRING, "description": "City and country"}, "unit": _enum("celsius", "fahrenheit")},
        ["location"],
        {"location": "Zürich, Switzerland", "unit": "celsius"},
    ),
    _function(
        "create_event",
        {
            "title": STRING,
            "start": DATE_TIME,
            "end": DATE_TIME,
            "attendees": _array({"type": "string", "format": "email"}),
            "is_all_day": BOOLEAN,
        },
        ["title", "start", "end"],
        {
            "title": "Standup",
            "start": "2026-03-02T09:00:00Z",
            "end": "2026-03-02T09:15:00Z",
            "attendees": ["ada@example.org", "alan@example.org"],
            "is_all_day": False,
        },
    ),
    _function(
        "run_sql",
        {
            "query": {"type": "string", "pattern": "^SELECT .+$"},
            "parameters": _array({"anyOf": [STRING, NUMBER, BOOLEAN, {"type": "null"}]}),
            "row_limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        },
        ["query", "row_limit"],
        {
            "query": "SELECT name FROM users WHERE age > ?",
            "parameters": [21, None, "x", True],
            "row_limit": 50,
        },
    ),
    _function(
        "upsert_contact",
        {
            "first_name": {"type": "string", "minLength": 1, "maxLength": 40},
            "last_name": {"type": "string", "minLength": 1, "maxLength": 40},
            "email": {"type": "string", "format": "email"},
            "phone": {"type": "string", "pattern": "^\\+[1-9][0-9]{6,14}$"},
            "company": {"type": ["string", "null"]},
            "stage": _enum("lead", "qualified", "customer", "churned"),
        },
        ["first_name", "last_name", "email", "stage"],
        {
            "first_name": "Grace",
            "last_name": "Hopper",
            "email": "grace@navy.example",
            "phone": "+12025550123",
            "company": None,
            "stage": "customer",
        },
    ),
    _function(
        "place_order",
        {
            "customer_id": {"type": "string", "format": "uuid"},
            "lines": _array(
                {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                        "unit_price": {"type": "number", "minimum": 0},
                    },
                    "required": ["sku", "quantity"],
                    "additionalProperties": False,
                },
                minItems=1,
                maxItems=20,
            ),
            "currency": _enum("EUR", "USD", "CHF"),
        },
        ["customer_id", "lines", "currency"],
        {
            "customer_id": "3f2c8a74-5b1d-4e0f-9c7a-2d6b8e1f0a93",
            "lines": [
                {"sku": "ABC-1234", "quantity": 2, "unit_price": 9.5},
                {"sku": "XYZ-0001", "quantity": 1},
            ],
            "currency": "CHF",
        },
    ),
    _function(
        "set_thermostat",
        {
            "zone": _enum("living", "bedroom", "kitchen"),
            "celsius": {"type": "number", "minimum": 5, "maximum": 30},
        },
        ["zone", "celsius"],
        {"zone": "kitchen", "celsius": 21.5},
    ),
    _function(
        "search_flights",
        {
            "origin": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "destination": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "departure": DATE,
            "return": {"anyOf": [DATE, {"type": "null"}]},
            "passengers": {"$ref": "#/$defs/Passengers"},
            "cabin": {**_enum("economy", "business", "first"), "default": "economy"},
        },
        ["origin", "destination", "departure", "return", "passengers"],
        {
            "origin": "ZRH",
            "destination": "LIS",
            "departure": "2026-07-14",
            "return": None,
            "passengers": {"adults": 2, "children": 1},
            "cabin": "economy",
        },
        definitions={
            "Passengers": {
                "type": "object",
                "properties": {
                    "adults": {"type": "integer", "minimum": 1, "maximum": 9},
                    "children": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["adults"],
                "additionalProperties": False,
            }
        },
    ),
    _function(
        "send_message",
        {
            "channel": {"anyOf": [{"$ref": "#/$defs/Email"}, {"$ref": "#/$defs/Sms"}]},
            "body": {"type": "string", "maxLength": 500},
        },
        ["channel", "body"],
        {"channel": {"kind": "sms", "number": "+41790000000"}, "body": 'Line one\nand "two"'},
        definitions={
            "Email": _one_of("email", address={"type": "string", "format": "email"}, subject=STRING),
            "Sms": _one_of("sms", number=STRING),
        },
    ),
    _function(
        "build_tree",
        {"root": {"$ref": "#/$defs/Node"}},
        ["root"],
        {"root": {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": []}]}},
        definitions={
            "Node": {
                "type": "object",
                "properties": {"value": INTEGER, "children": _array({"$ref": "#/$defs/Node"})},
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    ),
    _function(
        "filter_rows",
        {"where": {"$ref": "#/$defs/Expression"}},
        ["where"],
        {
            "where": {
                "kind": "and",
                "terms": [
                    {"kind": "compare", "column": "age", "operator": ">=", "value": 18},
                    {"kind": "compare", "column": "city", "operator": "=", "value": "Bern"},
                ],
            }
        },
        definitions={
            "Expression": {"anyOf": [{"$ref": "#/$defs/And"}, {"$ref": "#/$defs/Compare"}]},
            "And": _one_of("and", terms=_array({"$ref": "#/$defs/Expression"}, minItems=2)),
            "Compare": _one_of(
                "compare",
                column=STRING,
                operator=_enum("=", "!=", "<", "<=", ">", ">="),
                value={"type": ["string", "number", "boolean"]},
            ),
        },
    ),
    _function(
        "classify_ticket",
        {
            "category": _enum("billing", "bug", "feature request", "other"),
            "severity": _enum(1, 2, 3, 4),
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "tags": _array(STRING, maxItems=5),
        },
        ["category", "severity", "confidence", "tags"],
        {"category": "feature request", "severity": 3, "confidence": 0.82, "tags": ["export", "csv"]},
    ),
    _function(
        "extract_invoice",
        {
            "number": STRING,
            "issued": DATE,
            "due": DATE,
            "supplier": {"$ref": "#/$defs/Party"},
            "buyer": {"$ref": "#/$defs/Party"},
            "items": _array({"$ref": "#/$defs/Item"}),
            "total": NUMBER,
            "is_paid": BOOLEAN,
        },
        ["number", "issued", "supplier", "buyer", "items", "total"],
        {
            "number": "2026-0042",
            "issued": "2026-01-31",
            "due": "2026-03-02",
            "supplier": {"name": "Acme AG", "vat_id": "CHE123", "address": {"city": "Bern", "country": "CH"}},
            "buyer": {"name": "Foo GmbH", "address": {"city": "Wien", "country": "AT"}},
            "items": [{"description": "Pump", "amount": 1200.0}, {"description": "Pipe", "amount": -10}],
            "total": 1190.0,
        },
        definitions={
            "Address": {
                "type": "object",
                "properties": {
                    "street": STRING,
                    "city": STRING,
                    "country": {"type": "string", "pattern": "^[A-Z]{2}$"},
                },
                "required": ["city", "country"],
                "additionalProperties": False,
            },
            "Party": {
                "type": "object",
                "properties": {"name": STRING, "vat_id": STRING, "address": {"$ref": "#/$defs/Address"}},
                "required": ["name", "address"],
                "additionalProperties": False,
            },
            "Item": {
                "type": "object",
                "properties": {"description": STRING, "amount": NUMBER},
                "required": ["description", "amount"],
                "additionalProperties": False,
            },
        },
    ),
    _function(
        "plot",
        {
            "points": _array(
                {
                    "type": "array",
                    "prefixItems": [NUMBER, NUMBER],
                    "items": False,
                    "minItems": 2,
                    "maxItems": 2,
                }
            ),
            "style": _enum("line", "scatter"),
        },
        ["points"],
        {"points": [[0, 1.5], [-2e3, 4]], "style": "scatter"},
    ),
    _function(
        "multiply",
        {"left": _array(_array(NUMBER)), "right": _array(_array(NUMBER))},
        ["left", "right"],
        {"left": [[1, 2], [3, 4]], "right": [[0.5, 0], [0, 0.5]]},
    ),
    _function(
        "http_request",
        {
            "method": _enum("GET", "POST", "PUT", "DELETE"),
            "url": {"type": "string", "format": "uri"},
            "headers": {"type": "object", "additionalProperties": STRING},
            "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 120},
        },
        ["method", "url"],
        {
            "method": "GET",
            "url": "https://example.org/a?b=1",
            "headers": {"Accept": "text/html"},
            "timeout_s": 10,
        },
    ),
    _function(
        "configure_host",
        {
            "address": {"type": "string", "format": "ipv4"},
            "hostname": {"type": "string", "format": "hostname"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "protocol": {"const": "tcp"},
        },
        ["address", "port", "protocol"],
        {"address": "10.0.0.17", "hostname": "db-1.example.org", "port": 5432, "protocol": "tcp"},
    ),
    _function(
        "remember",
        {
            "facts": {
                "type": "object",
                "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
            }
        },
        ["facts"],
        {"facts": {"favourite colour": "green", "age": 41, "vegetarian": True}},
    ),
    _function(
        "label_entities",
        {
            "entities": _array(
                {
                    "type": "object",
                    "properties": {
                        "text": STRING,
                        "label": _enum("PERSON", "PLACE", "ORGANISATION", "DATE"),
                        "start": {"type": "integer", "minimum": 0},
                        "end": {"type": "integer", "minimum": 0},
                    },
                    "required": ["text", "label", "start", "end"],
                    "additionalProperties": False,
                }
            )
        },
        ["entities"],
        {"entities": [{"text": "Ada", "label": "PERSON", "start": 0, "end": 3}]},
    ),
    _function(
        "answer_step_by_step",
        {
            "steps": _array(
                {
                    "type": "object",
                    "properties": {"explanation": STRING, "output": STRING},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                }
            ),
            "final_answer": STRING,
        },
        ["steps", "final_answer"],
        {"steps": [{"explanation": "Subtract 7.", "output": "8x = -30"}], "final_answer": "x = -3.75"},
    ),
    _function(
        "draw",
        {
            "shapes": _array(
                {"oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Box"}, {"$ref": "#/$defs/Path"}]}
            )
        },
        ["shapes"],
        {"shapes": [{"kind": "circle", "radius": 2}, {"kind": "path", "points": [{"x": 0, "y": 1}]}]},
        definitions={
            "Point": {
                "type": "object",
                "properties": {"x": NUMBER, "y": NUMBER},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "Circle": _one_of("circle", radius={"type": "number", "exclusiveMinimum": 0}),
            "Box": _one_of("box", width=NUMBER, height=NUMBER),
            "Path": _one_of("path", points=_array({"$ref": "#/$defs/Point"})),
        },
    ),
    _function(
        "update_settings",
        {
            name: {"anyOf": [kind, {"type": "null"}]}
            for name, kind in (
                ("theme", _enum("light", "dark")),
                ("language", STRING),
                ("font_size", {"type": "integer", "minimum": 8, "maximum": 32}),
                ("sound", BOOLEAN),
                ("volume", {"type": "number", "minimum": 0, "maximum": 1}),
                ("shortcuts", {"type": "object", "additionalProperties": STRING}),
            )
        },
        ["theme", "language", "font_size", "sound", "volume", "shortcuts"],
        {
            "theme": "dark",
            "language": None,
            "font_size": 14,
            "sound": None,
            "volume": 0.5,
            "shortcuts": {"save": "^S"},
        },
    ),
    _function(
        "optional_everything",
        {f"option_{number}": _enum("on", "off") if number % 2 else INTEGER for number in range(16)},
        [],
        {"option_1": "on", "option_4": 4, "option_15": "off"},
    ),
    _function(
        "choose_country",
        {
            "country": _enum(
                *(
                    "AT",
                    "BE",
                    "BG",
                    "CA",
                    "CH",
                    "CZ",
                    "DE",
                    "DK",
                    "EE",
                    "ES",
                    "FI",
                    "FR",
                    "GB",
                    "GR",
                    "HR",
                    "HU",
                ),
                *(
                    "IE",
                    "IS",
                    "IT",
                    "JP",
                    "LT",
                    "LU",
                    "LV",
                    "MT",
                    "NL",
                    "NO",
                    "PL",
                    "PT",
                    "RO",
                    "SE",
                    "SI",
                    "SK",
                ),
            )
        },
        ["country"],
        {"country": "CH"},
    ),
    _function(
        "open_ended",
        {"name": STRING, "payload": {}},
        ["name"],
        {"name": "x", "payload": {"anything": [1, {"deep": None}]}, "extra": 1},
        is_closed=False,
    ),
    _function(
        "schedule_job",
        {
            "cron": {"type": "string", "pattern": r"^(\*|[0-5]?\d) (\*|1?\d|2[0-3]) \* \* (\*|[0-6])$"},
            "time": {"type": "string", "format": "time"},
            "retry": {
                "type": "object",
                "properties": {
                    "max_attempts": {"type": "integer", "minimum": 0, "maximum": 10},
                    "backoff": {"type": "number", "minimum": 1.0, "maximum": 4.0},
                },
                "required": ["max_attempts"],
                "additionalProperties": False,
            },
        },
        ["cron"],
        {"cron": "30 4 * * 1", "time": "04:30:00Z", "retry": {"max_attempts": 3, "backoff": 1.5}},
    ),
    _function(
        "patch_document",
        {
            "operations": _array(
                {
                    "type": "object",
                    "properties": {
                        "op": _enum("add", "remove", "replace"),
                        "path": {"type": "string", "pattern": "^(/[^/~]*(~[01][^/~]*)*)*$"},
                        "value": {},
                    },
                    "required": ["op", "path"],
                    "additionalProperties": False,
                },
                minItems=1,
            )
        },
        ["operations"],
        {
            "operations": [
                {"op": "add", "path": "/a/0", "value": {"b": [1]}},
                {"op": "remove", "path": "/c~1d"},
            ]
        },
    ),
    _function(
        "book_table",
        {
            "restaurant": STRING,
            "guests": {"allOf": [INTEGER, {"minimum": 1}, {"maximum": 12}]},
            "seating": {"type": "string", "enum": ["inside", "outside"], "title": "Seating"},
            "allergies": {**_array(STRING), "default": [], "description": "None: an empty list"},
        },
        ["restaurant", "guests", "seating", "allergies"],
        {"restaurant": "Chez Nous", "guests": 4, "seating": "outside", "allergies": []},
    ),
    _function(
        "list_unique",
        {
            "ids": _array({"type": "integer", "multipleOf": 5}, minItems=2, maxItems=4),
            "reason": {"minLength": 3, **STRING},
        },
        ["ids", "reason"],
        {"ids": [5, 10], "reason": "because"},
    ),
)
