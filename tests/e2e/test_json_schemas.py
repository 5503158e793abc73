"""Schemas as people have them: the model's answers satisfy them, or they are refused."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import openai
import pytest

from engine_service.structured_output.json_schema import schemas_in
from tests.application_schemas import APPLICATION_SCHEMAS, ApplicationSchema
from tests.real_stack import MODEL
from tests.shipped_schemas import shipped_schemas

SHIPPED_SCHEMAS = tuple(
    ApplicationSchema(name, f"Write a short example of the file that is configured by {name}.", schema)
    for name, schema in shipped_schemas().items()
)
IN_EVERY_RUN = ("ticket", "plan", "delivery", "shapes", "sentiment", "github-discussion")
SOAK_SEEDS = (1, 2, 3, 4)
MAX_TOKENS = 400
# What is ignored where a schema is not strict.
IGNORED_KEYWORDS = (
    *("uniqueItems", "not", "if", "then", "else", "propertyNames", "minProperties", "maxProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains", "maxContains"),
    *("unevaluatedProperties", "unevaluatedItems"),
)

FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    without_leap_second = re.sub(r":60(?=[.Z+-])", ":59", value.upper())
    return datetime.datetime.fromisoformat(without_leap_second).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def is_time(value: object) -> bool:
    return not isinstance(value, str) or is_date_time(f"2000-01-01T{value}")


@FORMATS.checks("duration")
def is_duration(value: object) -> bool:
    units = r"P(?=[\dT])(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?"
    return not isinstance(value, str) or re.fullmatch(units, value) is not None


@FORMATS.checks("hostname")
def is_hostname(value: object) -> bool:
    label = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return not isinstance(value, str) or re.fullmatch(rf"{label}(\.{label})*", value) is not None


@FORMATS.checks("uri", raises=ValueError)
def is_uri(value: object) -> bool:
    return not isinstance(value, str) or (urlsplit(value).scheme != "" and " " not in value)


@dataclass(frozen=True, slots=True)
class Outcome:
    end: str  # "stop", "length" or "refused"
    text: str  # the answer, or why there is none


def ask(
    client: openai.OpenAI,
    case: ApplicationSchema,
    *,
    is_strict: bool,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    is_streamed: bool = False,
) -> Outcome:
    asked = {"name": case.name, "schema": case.schema, "strict": is_strict}
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{case.request} Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": asked},
        "temperature": 1,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    try:
        if not is_streamed:
            choice = client.chat.completions.create(**options).choices[0]
            return Outcome(choice.finish_reason, choice.message.content or "")
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        text = "".join(choice.delta.content or "" for choice in choices)
        return Outcome(choices[-1].finish_reason or "", text)
    except openai.BadRequestError as error:
        if error.param != "response_format":
            raise
        return Outcome("refused", error.body["message"])


def fault(schema: dict[str, Any], text: str) -> str:
    """Why the text does not satisfy the schema; "" if it does."""
    # In decimals: 0.07 is a multiple of 0.01, which floats do not know.
    schema = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
    try:
        document = json.loads(text, parse_float=decimal.Decimal)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema.validators.validator_for(schema)(schema, format_checker=FORMATS)
    try:
        with decimal.localcontext(prec=2000):
            error = next(validator.iter_errors(document), None)
    except re.error:  # a pattern in a syntax that Python does not have: \p{...}
        return ""
    return "" if error is None else f"{error.json_path}: {error.message[:200]}"


def enforced_part(schema: dict[str, Any]) -> dict[str, Any]:
    """What is promised of a schema that is not strict."""
    schema = copy.deepcopy(schema)
    for each in schemas_in(schema):
        for keyword in IGNORED_KEYWORDS:
            each.pop(keyword, None)
        if "oneOf" in each:
            each.setdefault("allOf", []).append({"anyOf": each.pop("oneOf")})
    return schema


def check_answers(
    client: openai.OpenAI, cases: Sequence[ApplicationSchema], seeds: Sequence[int], *, is_strict: bool
) -> Counter[str]:
    """How the answers ended. Each is asked for streamed and whole, all of them in one company."""
    client = client.with_options(timeout=900)
    asked = [(case, seed, is_streamed) for case in cases for seed in seeds for is_streamed in (False, True)]
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(
            threads.map(lambda a: ask(client, a[0], is_strict=is_strict, seed=a[1], is_streamed=a[2]), asked)
        )
    faults = []
    for (case, seed, is_streamed), outcome in zip(asked, outcomes, strict=True):
        if outcome.end == "stop":
            problem = fault(case.schema if is_strict else enforced_part(case.schema), outcome.text)
        else:
            problem = "" if outcome.end == "length" else f"{outcome.end}: {outcome.text}"
        if problem:
            faults.append(f"{case.name}, seed {seed}, streamed {is_streamed}: {problem}\n{outcome.text}")
    assert not faults, "\n".join(faults)
    assert outcomes[0::2] == outcomes[1::2], "streamed and whole, an answer is the same"
    return Counter(outcome.end for outcome in outcomes)


def first_tokens(
    client: openai.OpenAI, cases: Sequence[ApplicationSchema], *, is_strict: bool
) -> dict[str, Outcome]:
    """By the names of the schemas: what comes of them, apart from the answer."""
    with ThreadPoolExecutor(8) as threads:
        outcomes = threads.map(lambda case: ask(client, case, is_strict=is_strict, max_tokens=1), cases)
        return dict(zip((case.name for case in cases), outcomes, strict=True))


def share_refused(outcomes: dict[str, Outcome]) -> str:
    num_refused = sum(outcome.end == "refused" for outcome in outcomes.values())
    return f"{num_refused} of {len(outcomes)} refused ({num_refused / len(outcomes):.0%})"


def test_what_cannot_be_kept_to_is_refused_with_the_word_named(client):
    outcomes = first_tokens(client, APPLICATION_SCHEMAS, is_strict=True)
    shipped = first_tokens(client, SHIPPED_SCHEMAS, is_strict=True)
    print(f"applications: {share_refused(outcomes)}; shipped: {share_refused(shipped)}")
    for case in APPLICATION_SCHEMAS:
        outcome = outcomes[case.name]
        assert (outcome.end == "refused") == bool(case.refused), (case.name, outcome)
        assert case.refused in outcome.text, case.name
    assert {outcome.end for outcome in shipped.values()} == {"refused", "length"}
    assert len(outcomes) + len(shipped) >= 50


def test_answers_satisfy_their_schemas_streamed_and_whole(client):
    cases = [case for case in (*APPLICATION_SCHEMAS, *SHIPPED_SCHEMAS) if case.name in IN_EVERY_RUN]
    ends = check_answers(client, cases, (1,), is_strict=True)
    assert ends["stop"] >= len(cases), "as many are complete as are cut off, at least"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cases", [APPLICATION_SCHEMAS, SHIPPED_SCHEMAS], ids=["of applications", "shipped"])
def test_all_answers_satisfy_their_schemas(client, cases):
    """Those that are refused where strict are asked for once more: then they are kept to in part."""
    for is_strict in (True, False):
        outcomes = first_tokens(client, cases, is_strict=is_strict)
        kept = [case for case in cases if outcomes[case.name].end != "refused"]
        cases = [case for case in cases if outcomes[case.name].end == "refused"]
        ends = check_answers(client, kept, SOAK_SEEDS, is_strict=is_strict)
        print(
            f"\n{'strict' if is_strict else 'not strict'}: {share_refused(outcomes)}; "
            f"of {ends.total()} answers {ends['stop']} are complete and satisfy their schema, "
            f"{ends['length']} are cut off after {MAX_TOKENS} tokens"
        )
        for case in cases:
            print(f"  {case.name}: {outcomes[case.name].text}")
