"""Bytes that a client might send where a JSON document is wanted: right ones, broken in one or two places."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.odd_values import ODD_VALUES, as_json
from tests.request_bodies import places_in, with_value_at

_MARK = "\x00here\x00"
_HUGE = ("9" * 400, "-" + "9" * 5000, "1e400", "-1e400", "1e-400", f"1{'0' * 100}.5", f"0.{'0' * 500}1")
_NO_JSON = (
    "NaN",
    "-Infinity",
    "01",
    "0x10",
    "+1",
    "1.",
    ".5",
    "'x'",
    "undefined",
    "tru",
    "",
    "/**/1",
    '"\t"',
)
_TEXTS = (
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', '"\\x"', '"""'),
    '"\u202e\ufeff\u2028"',
)
_NAMES = (
    *("", "\0", "\ud800", "é", "ｍｏｄｅｌ", "__proto__", "model ", "a.b[0]"),
    *("\U0001f600" * 50, "x" * 5000),
)
_SNIPPETS = (
    *(b"\x00", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
    *(b"{", b"]", b'"', b"\\", b","),
)

Mutation = Callable[[random.Random, dict[str, Any]], bytes]


def fuzzed_bodies(examples: Sequence[dict[str, Any]], randomness: random.Random) -> Iterator[bytes]:
    """Without end. Examples that are empty have no place to break."""
    examples = [example for example in examples if example]
    while True:
        mutate = randomness.choice(_MUTATIONS)
        body = mutate(randomness, randomness.choice(examples))
        if randomness.random() < 0.1:
            body = _with_garbage(randomness, body)
        yield body


def _with_raw(randomness: random.Random, example: dict[str, Any], raw: str) -> bytes:
    """With these characters instead of the value at some place."""
    place = randomness.choice(list(places_in(example)))
    text = as_json(with_value_at(example, place, _MARK)).replace(as_json(_MARK), raw)
    return text.encode("utf-8", "surrogatepass")


def _cut(randomness: random.Random, example: dict[str, Any]) -> bytes:
    text = as_json(example).encode()
    return text[: randomness.randrange(len(text))]


def _nested(randomness: random.Random, example: dict[str, Any]) -> bytes:
    depth = randomness.choice((2, 30, 200, 1000, 5000, 50_000))
    opening, closing = randomness.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    return _with_raw(
        randomness, example, opening * depth + "1" + closing * randomness.choice((depth, depth, 0))
    )


def _number(randomness: random.Random, example: dict[str, Any]) -> bytes:
    return _with_raw(randomness, example, randomness.choice(_HUGE))


def _no_json(randomness: random.Random, example: dict[str, Any]) -> bytes:
    return _with_raw(randomness, example, randomness.choice(_NO_JSON))


def _text(randomness: random.Random, example: dict[str, Any]) -> bytes:
    return _with_raw(randomness, example, randomness.choice(_TEXTS))


def _other_type(randomness: random.Random, example: dict[str, Any]) -> bytes:
    value = randomness.choice(list(ODD_VALUES.values()))
    return _with_raw(randomness, example, as_json(value))


def _swapped(randomness: random.Random, example: dict[str, Any]) -> bytes:
    """A value of the document where another one belongs."""
    source = randomness.choice(list(places_in(example)))
    value: Any = example
    for part in source:
        value = value[part]
    return _with_raw(randomness, example, as_json(value))


def _without_one(randomness: random.Random, example: dict[str, Any]) -> bytes:
    place = randomness.choice(list(places_in(example)))
    changed = with_value_at(example, place, _MARK)
    target = changed
    for part in place[:-1]:
        target = target[part]
    del target[place[-1]]
    return as_json(changed).encode()


def _twice(randomness: random.Random, example: dict[str, Any]) -> bytes:
    """A key that is there two times, the first or the last time with another value."""
    name = randomness.choice([*example, "model"])
    odd = f"{as_json(name)}: {as_json(randomness.choice(list(ODD_VALUES.values())))}"
    inside = as_json(example)[1:-1]
    parts = [part for part in (odd, inside) if part]
    randomness.shuffle(parts)
    return ("{" + ", ".join(parts) + "}").encode()


def _named(randomness: random.Random, example: dict[str, Any]) -> bytes:
    """A name that no field has, beside the others or instead of a value."""
    name = randomness.choice([*_NAMES, "".join(randomness.choices(string.printable, k=8))])
    if randomness.random() < 0.5:
        return as_json(example | {name: 1}).encode()
    return _with_raw(randomness, example, as_json({name: 1}))


def _bytes(randomness: random.Random, example: dict[str, Any]) -> bytes:
    return randomness.randbytes(randomness.choice((0, 1, 7, 300)))


def _encoded(randomness: random.Random, example: dict[str, Any]) -> bytes:
    return as_json(example).encode(randomness.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")))


def _around(randomness: random.Random, example: dict[str, Any]) -> bytes:
    text = as_json(example)
    return randomness.choice(
        (text * 2, f"[{text}]", " " * 10_000 + text, text + "\0", json.dumps(text), text + ",", "\v" + text)
    ).encode()


def _with_garbage(randomness: random.Random, body: bytes) -> bytes:
    """Some bytes put in, left out, or turned over."""
    at = randomness.randrange(len(body) + 1)
    match randomness.randrange(3):
        case 0:
            return body[:at] + randomness.choice(_SNIPPETS) + body[at:]
        case 1:
            return body[:at] + body[at + randomness.randrange(1, 20) :]
        case _:
            return body[:at] + bytes(255 - byte for byte in body[at : at + 1]) + body[at + 1 :]


_MUTATIONS: tuple[Mutation, ...] = (
    _cut, _nested, _number, _no_json, _text, _other_type, _other_type, _other_type, _swapped, _without_one,
    _twice, _named, _bytes, _encoded, _around, lambda randomness, example: _with_garbage(
        randomness, as_json(example).encode()
    ),
)  # fmt: skip
