"""Schemas of answers that applications ask for: as pydantic makes them, zod's converters, and people.

Each stands for a habit, with what the habit brings along: titles, tags with defaults, unions with null,
definitions, patterns for e-mail addresses. Those that nobody can keep to while text is generated are
among them; `refused` says for which word.
"""

from __future__ import annotations

import datetime
import ipaddress
import uuid
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, StringConstraints


@dataclass(frozen=True, slots=True)
class ApplicationSchema:
    name: str
    request: str  # what the user says
    schema: dict[str, Any]
    refused: str = ""  # a word of the refusal where it is strict; "": it can be kept to


# ---------------------------------------------------------------------------- pydantic


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Severity(StrEnum):
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Ticket(Strict):
    """A support ticket, sorted."""

    category: Literal["billing", "bug", "feature_request", "account", "other"]
    severity: Severity
    confidence: float = Field(ge=0, le=1)
    summary: str = Field(max_length=120, description="One sentence")
    needs_human: bool
    duplicate_of: int | None = Field(None, gt=0)


class InvoiceLine(BaseModel):
    description: Annotated[str, StringConstraints(min_length=1, max_length=60)]
    quantity: int = Field(ge=1)
    unit_price: float = Field(ge=0)


class Company(BaseModel):
    name: str
    country: Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")]
    vat_id: str | None = None


class Invoice(BaseModel):
    number: Annotated[str, StringConstraints(pattern=r"^INV-\d{4}-\d{1,6}$")]
    issued: datetime.date
    due: datetime.date | None = None
    supplier: Company
    buyer: Company
    lines: Annotated[list[InvoiceLine], Field(min_length=1, max_length=4)]
    currency: Literal["EUR", "USD", "GBP"] = "EUR"
    total: float


class Job(BaseModel):
    employer: str
    title: str
    start: Annotated[str, StringConstraints(pattern=r"^\d{4}-(0[1-9]|1[0-2])$")]
    end: Annotated[str, StringConstraints(pattern=r"^\d{4}-(0[1-9]|1[0-2])$")] | None


class Resume(Strict):
    full_name: str
    email: Annotated[str, Field(json_schema_extra={"format": "email"})]
    homepage: HttpUrl | None = None
    years_of_experience: int = Field(ge=0, le=60)
    jobs: Annotated[list[Job], Field(max_length=3)]
    skills: dict[str, Literal["beginner", "advanced", "expert"]]


class Comment(BaseModel):
    """A thread: it holds itself."""

    author: Annotated[str, StringConstraints(max_length=20)]
    text: Annotated[str, StringConstraints(max_length=80)]
    replies: Annotated[list[Comment], Field(max_length=2)] = []


class Search(Strict):
    action: Literal["search"] = "search"
    query: Annotated[str, StringConstraints(max_length=60)]
    max_results: int = Field(5, ge=1, le=20)


class Calculate(Strict):
    action: Literal["calculate"] = "calculate"
    expression: Annotated[str, StringConstraints(pattern=r"^[0-9+*/(). -]{1,30}$")]


class Finish(Strict):
    action: Literal["finish"] = "finish"
    answer: Annotated[str, StringConstraints(max_length=120)]


class Plan(Strict):
    """What an agent will do: a union with a tag that has a default, so that it is not required."""

    thought: Annotated[str, StringConstraints(max_length=120)]
    steps: Annotated[
        list[Annotated[Search | Calculate | Finish, Field(discriminator="action")]],
        Field(min_length=1, max_length=4),
    ]


class Leaf(Strict):
    kind: Literal["leaf"]
    field: Literal["title", "author", "year", "price"]
    operator: Literal["=", "<", ">", "contains"]
    value: str | int | float | bool | None


class Branch(Strict):
    kind: Literal["and", "or"]
    terms: Annotated[
        list[Annotated[Leaf | Branch, Field(discriminator="kind")]], Field(min_length=1, max_length=3)
    ]


class Filter(Strict):
    """A search filter: a union that holds itself."""

    where: Annotated[Leaf | Branch, Field(discriminator="kind")]
    limit: int = Field(10, multiple_of=5, ge=5, le=100)
    order: tuple[Literal["title", "year"], Literal["asc", "desc"]] | None = None


class Meeting(BaseModel):
    id: uuid.UUID
    title: Annotated[str, StringConstraints(max_length=40)]
    start: datetime.datetime
    length: datetime.timedelta
    daily_at: datetime.time | None = None
    attendees: list[str] = Field(max_length=4)


class Host(BaseModel):
    hostname: Annotated[
        str, StringConstraints(max_length=30), Field(json_schema_extra={"format": "hostname"})
    ]
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int = Field(ge=1, le=65535)
    mac: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}:){5}[0-9a-f]{2}$")]
    protocol: Literal["tcp", "udp"]


class Measurements(BaseModel):
    """Numbers of all sorts."""

    position: tuple[float, float]
    altitude_m: int = Field(gt=-500, lt=9000)
    humidity: float = Field(ge=0, lt=100)
    temperature_c: float = Field(ge=-89.2, le=56.7)
    step: Annotated[float, Field(multiple_of=0.25, ge=0, le=10)]
    samples: Annotated[list[float], Field(min_length=2, max_length=3)]


class Tagged(BaseModel):
    title: str
    tags: set[str]


class Budget(BaseModel):
    amounts: dict[Literal["rent", "food", "travel"], float]


class Payment(BaseModel):
    amount: Decimal = Field(ge=0, max_digits=12, decimal_places=2)
    iban: Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}\d{2}[A-Z0-9]{11,30}$")]
    reference: str | None


class Attachment(BaseModel):
    file_name: str
    content: bytes


# ---------------------------------------------------------------------------- zod

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020_12 = "https://json-schema.org/draft/2020-12/schema"
# What z.int() becomes.
SAFE_INTEGER = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
STRING: dict[str, Any] = {"type": "string"}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def text(max_length: int, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_length, **more}


def listed(items: Any, max_items: int, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": max_items, **more}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


MATH_STEPS = closed(
    {
        "steps": {"type": "array", "items": closed({"explanation": STRING, "output": STRING})},
        "final_answer": STRING,
    },
    **{"$schema": DRAFT_7},
)

INTERFACE = closed(
    {
        "type": {"type": "string", "enum": ["div", "button", "header", "section", "field", "form"]},
        "label": text(30),
        "children": listed({"$ref": "#"}, 2),
        "attributes": listed(closed({"name": text(12), "value": text(20)}), 2),
    },
    **{"$schema": DRAFT_7},
)

REVIEW = {
    "$schema": DRAFT_7,
    "$ref": "#/definitions/review",
    "definitions": {
        "review": closed(
            {
                "sentiment": {"type": "string", "enum": ["positive", "neutral", "negative"]},
                "stars": {"type": "integer", "minimum": 1, "maximum": 5},
                "product": {
                    "anyOf": [closed({"name": text(40), "price": {"type": "number"}}), {"type": "null"}]
                },
                "quotes": listed(text(60), 3),
                "language": {"type": ["string", "null"]},
            }
        )
    },
}

SIGN_UP = closed(
    {
        "email": {"type": "string", "format": "email"},
        "website": {"type": "string", "format": "uri", "maxLength": 60},
        "id": {"type": "string", "format": "uuid"},
        "age": {"type": "integer", "exclusiveMinimum": 17, "maximum": 120},
        "newsletter": {"type": "boolean", "default": False},
    },
    ["email", "id", "age"],
    **{"$schema": DRAFT_7},
)

TIMELINE = closed(
    {
        "from": {
            "type": "string",
            "format": "date-time",
            "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,3})?)?Z$",
        },
        "day": {"type": "string", "format": "date", "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "events": listed(closed({"year": SAFE_INTEGER, "what": text(50)}), 3, minItems=1),
        "extra": {"type": "object", "propertyNames": STRING, "additionalProperties": {}},
    },
    ["from", "day", "events"],
    **{"$schema": DRAFT_2020_12},
)

SHAPES = closed(
    {
        "shapes": listed(
            {
                "anyOf": [
                    closed(
                        {
                            "kind": STRING | {"const": "circle"},
                            "radius": {"type": "number", "exclusiveMinimum": 0},
                        }
                    ),
                    closed({"kind": STRING | {"const": "box"}, "size": {"$ref": "#/$defs/size"}}),
                ]
            },
            3,
            minItems=1,
        )
    },
    **{
        "$schema": DRAFT_2020_12,
        "$defs": {
            "size": {
                "type": "array",
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
                "items": False,
            }
        },
    },
)

CONTACT = closed(
    {
        "email": {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-.]*)[A-Za-z0-9_+-]@([A-Za-z0-9-]+\.)+[A-Za-z]{2,}$",
        }
    },
    **{"$schema": DRAFT_2020_12},
)

# ---------------------------------------------------------------------------- by hand

SQL = {
    "type": "object",
    "description": "Arguments of the tool that reads the warehouse",
    "properties": {
        "query": {
            "type": "string",
            "pattern": r"^SELECT [^;]{1,120}$",
            "description": "One statement, no semicolon",
        },
        "parameters": {
            "type": "array",
            "items": {"anyOf": [{"type": ["string", "number", "boolean"]}, {"type": "null"}]},
            "maxItems": 3,
        },
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 30, "default": 5},
    },
    "required": ["query", "parameters"],
}

MODERATION = closed(
    {
        name: closed(
            {"flagged": {"type": "boolean"}, "score": {"type": "number", "minimum": 0, "maximum": 1}}
        )
        for name in ("hate", "violence", "self_harm", "spam")
    }
)

ENTITIES = listed(
    closed(
        {
            "text": text(30, minLength=1),
            "label": {"enum": ["PERSON", "PLACE", "ORGANISATION", "DATE", "OTHER"]},
            "start": {"type": "integer", "minimum": 0},
        }
    ),
    5,
    minItems=1,
)

TRIPLES = closed(
    {
        "triples": listed(
            closed({"subject": text(24), "predicate": {"$ref": "#/$defs/Predicate"}, "object": text(24)}), 4
        ),
        "aliases": {"type": "object", "additionalProperties": listed(text(16), 2), "maxProperties": 2},
    },
    **{"$defs": {"Predicate": {"enum": ["is_a", "part_of", "located_in", "works_for"]}}},
)

RECIPE = {
    "type": "object",
    "properties": {
        "name": text(40),
        "servings": {"type": "integer", "enum": [1, 2, 4, 6]},
        "ingredients": listed(
            {
                "type": "object",
                "properties": {
                    "item": text(20),
                    "amount": {"type": "number"},
                    "unit": {"enum": ["g", "ml", "pc", None]},
                },
                "required": ["item", "amount"],
                "additionalProperties": False,
            },
            4,
            minItems=2,
        ),
        "steps": listed(text(60), 4, minItems=1),
        "vegan": {"type": "boolean"},
    },
    "required": ["name", "ingredients", "steps"],
    "additionalProperties": False,
}

INTAKE = {
    "type": "object",
    "title": "Patient intake",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "blood_pressure": {"type": "string", "pattern": "^[1-9][0-9]{1,2}/[1-9][0-9]{1,2}$"},
    },
    "patternProperties": {"^x-[a-z]{1,8}$": {"type": "string", "maxLength": 20}},
    "required": ["name", "born"],
    "additionalProperties": False,
}

PET = {  # as cut out of an OpenAPI document
    "type": "object",
    "required": ["name", "status"],
    "properties": {
        "id": {"type": "integer", "format": "int64", "example": 10, "minimum": 0},
        "name": {"type": "string", "example": "doggie", "maxLength": 20},
        "category": {"$ref": "#/components/schemas/Category"},
        "status": {"type": "string", "enum": ["available", "pending", "sold"], "nullable": True},
    },
    "additionalProperties": False,
    "components": {
        "schemas": {
            "Category": {
                "type": "object",
                "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 20}},
                "additionalProperties": False,
                "xml": {"name": "category"},
            }
        }
    },
}

COMMIT = closed(
    {
        "subject": {
            "type": "string",
            "pattern": r"^(feat|fix|docs|refactor|test)(\([a-z-]{1,12}\))?!?: [^\n]{5,50}$",
        },
        "body": {"type": ["string", "null"], "maxLength": 120},
        "breaking": {"const": False},
    }
)

CODE_REVIEW = closed(
    {
        "verdict": {"enum": ["approve", "comment", "request_changes"]},
        "comments": listed(
            {
                "allOf": [
                    {"$ref": "#/$defs/Location"},
                    {"properties": {"message": text(80), "severity": {"enum": ["nit", "issue", "blocker"]}}},
                    {"required": ["message", "severity"]},
                ]
            },
            3,
        ),
    },
    **{
        "$defs": {
            "Location": {
                "type": "object",
                "properties": {"path": text(40), "line": {"type": "integer", "minimum": 1}},
                "required": ["path", "line"],
            }
        }
    },
)

QUIZ = closed(
    {
        "question": text(80),
        "options": listed(text(30, minLength=1), 4, minItems=4),
        "answer": {"type": "integer", "minimum": 0, "maximum": 3},
        "explanation": text(100),
    }
)

DELIVERY = closed(
    {
        "to": {
            "oneOf": [
                closed(
                    {"street": text(30), "city": text(20), "postcode": text(8, pattern="^[0-9A-Z -]{4,8}$")}
                ),
                closed({"locker": {"type": "integer", "minimum": 1000, "maximum": 9999}}),
                {"type": "string", "enum": ["pick up", "none"]},
            ]
        },
        "express": {"type": "boolean"},
    }
)

SENTIMENT = {"type": "string", "enum": ["very negative", "negative", "neutral", "positive", "very positive"]}

SUGGESTION = {"anyOf": [closed({"suggestion": text(60)}), closed({"question": text(60)}), {"type": "null"}]}

TRANSLATION = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
    "additionalProperties": {"type": "string"},
}

ORDER = {
    "type": "object",
    "properties": {"method": {"enum": ["card", "cash"]}, "card_number": STRING},
    "required": ["method"],
    "if": {"properties": {"method": {"const": "card"}}},
    "then": {"required": ["card_number"]},
}

CARD = {
    "type": "object",
    "properties": {"number": STRING, "billing_address": STRING},
    "dependentRequired": {"number": ["billing_address"]},
}

REACHABLE = {
    "type": "object",
    "properties": {"email": STRING, "phone": STRING},
    "oneOf": [{"required": ["email"]}, {"required": ["phone"]}],
}

POLL = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}, "minProperties": 2}


def of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


APPLICATION_SCHEMAS: tuple[ApplicationSchema, ...] = (
    ApplicationSchema("ticket", "Sort this ticket: the export button does nothing since Monday.", of(Ticket)),
    ApplicationSchema(
        "invoice", "Extract the invoice: Acme AG to Foo GmbH, two pumps at 600 euros.", of(Invoice)
    ),
    ApplicationSchema(
        "resume", "Extract: Ada Lovelace, ten years at the Analytical Engine works.", of(Resume)
    ),
    ApplicationSchema("comments", "Write a short discussion about tea with two replies.", of(Comment)),
    ApplicationSchema("plan", "Plan how to find out how many days are left until Christmas.", of(Plan)),
    ApplicationSchema("filter", "Books by Woolf before 1930 that cost less than 20.", of(Filter)),
    ApplicationSchema("meeting", "A stand-up every day at nine with Ada and Alan.", of(Meeting)),
    ApplicationSchema("host", "The database server in the second rack.", of(Host)),
    ApplicationSchema("measurements", "Readings of the weather station on the hill.", of(Measurements)),
    ApplicationSchema("math_steps", "Solve 8x + 7 = -23.", MATH_STEPS),
    ApplicationSchema("interface", "A form that asks for a name.", INTERFACE),
    ApplicationSchema("review", "It broke after two days, but the colour is nice.", REVIEW),
    ApplicationSchema("sign_up", "Grace Hopper, 37, wants to join.", SIGN_UP),
    ApplicationSchema("shapes", "Draw a snowman.", SHAPES),
    ApplicationSchema("sql", "How many users have signed up this year?", SQL),
    ApplicationSchema("moderation", "Judge: what a lovely day.", MODERATION),
    ApplicationSchema("entities", "Ada Lovelace met Charles Babbage in London.", ENTITIES),
    ApplicationSchema("triples", "The Rhine flows through Basel, a city in Switzerland.", TRIPLES),
    ApplicationSchema("recipe", "A recipe for pancakes.", RECIPE),
    ApplicationSchema("intake", "John Smith, born on 4 March 1980, 120 over 80.", INTAKE),
    ApplicationSchema("pet", "A dog called Rex that is for sale.", PET),
    ApplicationSchema("commit", "A message for a change that mends the login page.", COMMIT),
    ApplicationSchema("code_review", "Review: if (a = b) { return; }", CODE_REVIEW),
    ApplicationSchema("quiz", "A question about the planets.", QUIZ),
    ApplicationSchema("delivery", "Send it to 4 Mill Road, Cambridge.", DELIVERY),
    ApplicationSchema("sentiment", "I could not be happier.", SENTIMENT),
    ApplicationSchema("suggestion", "What shall I read next?", SUGGESTION),
    ApplicationSchema("tagged", "Tag this article about bees.", of(Tagged), "uniqueItems"),
    ApplicationSchema("budget", "How I spent 2000 euros.", of(Budget), "propertyNames"),
    ApplicationSchema("payment", "Pay 12.50 to Alan.", of(Payment)),
    ApplicationSchema("attachment", "Attach a greeting.", of(Attachment), "binary"),
    ApplicationSchema("timeline", "What happened in 1969?", TIMELINE),
    ApplicationSchema("contact", "The address of the editor.", CONTACT, "look-around"),
    ApplicationSchema("translation", "Good morning in five languages.", TRANSLATION, "propertyNames"),
    ApplicationSchema("order", "I will pay by card.", ORDER, "if"),
    ApplicationSchema("card", "My card and where I live.", CARD, "dependentRequired"),
    ApplicationSchema("reachable", "You can call me.", REACHABLE, "oneOf"),
    ApplicationSchema("poll", "Who wins, tea or coffee?", POLL, "minProperties"),
)
