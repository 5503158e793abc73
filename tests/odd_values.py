"""Values that no field of a request should have: what a careless or a hostile client might send."""

from __future__ import annotations

import json
import math
from typing import Any


def nested(depth: int, innermost: Any, key: str | None = None) -> Any:
    """Lists in lists, or dictionaries in dictionaries."""
    value = innermost
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


ODD_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "1": 1,
    "minus 1": -1,
    "2^31": 2**31,
    "minus 2^31 - 1": -(2**31) - 1,
    "2^63": 2**63,
    "2^64": 2**64,
    "minus 2^63 - 1": -(2**63) - 1,
    "400 digits": 10**400,
    "0.5": 0.5,
    "minus 0.0": -0.0,
    "smallest": 5e-324,
    "1e308": 1e308,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "no text": "",
    "text": "x",
    "number as text": "1",
    "NUL": "\0",
    "half of a surrogate pair": "\ud800",
    "long text": "x" * 50_000,
    "wide text": "\U0001f600" * 10_000,
    "empty list": [],
    "list of null": [None],
    "list of true": [True],
    "list of minus 1": [-1],
    "list of 2^31": [2**31],
    "list of 2^64": [2**64],
    "list of 0.5": [0.5],
    "list of no text": [""],
    "list of text": ["x"],
    "list of long texts": ["y" * 5000] * 5,
    "list of empty lists": [[], []],
    "list of lists": [[1], ["x"]],
    "list of an empty dict": [{}],
    "long list": [1] * 20_000,
    "long list of texts": ["x"] * 20_000,
    "empty dict": {},
    "dict": {"a": 1},
    "dict of a token": {"1": 1},
    "dict of no token": {"-1": 1},
    "dict of NaN": {"1": math.nan},
    "dict of a huge token": {"9" * 30: 1},
    "dict of null": {"1": None},
    "long dict": {str(number): 1 for number in range(5000)},
    "deep list": nested(200, 1),
    "deep dict": nested(200, 1, "a"),
}


def as_json(value: Any) -> str:
    """Also what JSON does not have: NaN, Infinity, halves of surrogate pairs."""
    return json.dumps(value)
