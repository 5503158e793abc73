"""Whether the alternatives of a `oneOf` exclude each other, so that it allows what `anyOf` would.

A grammar has no way to say "one of these and none of the others". Where no document can satisfy two
alternatives, nothing has to be said. That is proved here from types, constants and properties that
must be there: what tells the members of a union apart in the schemas that applications write. What is
not proved may hold all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from urllib.parse import unquote

_MAX_STEPS = 20_000  # a tenth of a second: pairs grow with the square of their number, and schemas are large
_MAX_DEPTH = 12

_FRACTION = "fraction"  # a number that is no integer
_KINDS_OF_TYPE = {
    "null": {"null"},
    "boolean": {"boolean"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
    "integer": {"integer"},
    "number": {"integer", _FRACTION},
}
_ALL_KINDS = frozenset().union(*_KINDS_OF_TYPE.values())


def make_alternatives_exclusive(document: Any, schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether all of them are, in the end. `schemas`: those of the document.

    A property whose constants tell the alternatives apart, but which may be absent, becomes required:
    pydantic writes unions so whose tag has a default. Documents without the tag would suit them all.
    """
    proof = _Proof(document, schemas)
    try:
        return all(
            proof.are_exclusive(alternatives)
            or (proof.require_tag(alternatives) and proof.are_exclusive(alternatives))
            for schema in schemas
            if isinstance(alternatives := schema.get("oneOf"), list)
        )
    except _TooLongError:
        return False


class _TooLongError(Exception):
    """The proof has taken all the steps that it may."""


@dataclass(slots=True)
class _Shape:
    """What all parts of a schema say together."""

    kinds: frozenset[str] = _ALL_KINDS
    values: frozenset[Any] | None = None  # None: any
    required: set[str] = field(default_factory=set)
    parts: list[dict[str, Any]] = field(default_factory=list)  # all of them hold

    def at(self, name: str) -> Iterator[Any]:
        """Schemas of the property, all of which hold."""
        for part in self.parts:
            properties = part.get("properties", {})
            if isinstance(properties, dict) and name in properties:
                yield properties[name]
            elif "patternProperties" not in part:
                yield part.get("additionalProperties", True)

    def unions(self) -> Iterator[list[Any]]:
        for part in self.parts:
            for keyword in ("anyOf", "oneOf"):
                if isinstance(options := part.get(keyword), list):
                    yield options


class _Proof:
    def __init__(self, document: Any, schemas: Iterable[dict[str, Any]]) -> None:
        self._document = document
        # A reference in a schema with a name of its own starts there, and not at the root.
        self._has_one_root = not any(
            isinstance(schema.get(keyword), str)
            for schema in schemas
            if schema is not document
            for keyword in ("$id", "id")
        )
        self._num_steps_left = _MAX_STEPS
        self._shapes: dict[int, _Shape] = {}  # by the identity of the schema, which the document keeps

    def _take_steps(self, number: int = 1) -> None:
        self._num_steps_left -= number
        if self._num_steps_left < 0:
            raise _TooLongError

    def are_exclusive(self, alternatives: list[Any]) -> bool:
        return all(self._exclude(one, other, 0) for one, other in combinations(alternatives, 2))

    def require_tag(self, alternatives: list[Any]) -> bool:
        """Requires the first property whose constants differ in all alternatives. False: there is none."""
        shapes = [self._shape(alternative) for alternative in alternatives]
        for name in _property_names(shapes[0]) if shapes else ():
            self._take_steps(len(shapes))
            values = [self._constants(shape, name) for shape in shapes]
            if all(values) and sum(map(len, values)) == len(frozenset().union(*values)):
                for shape in shapes:
                    _require(shape, name)
                self._shapes.clear()
                return True
        return False

    def _constants(self, shape: _Shape, name: str) -> frozenset[Any]:
        """The only values that the property may have; empty: it may have others."""
        constants = (self._shape(schema).values for schema in shape.at(name))
        return next((values for values in constants if values is not None), frozenset())

    def _exclude(self, one: Any, other: Any, depth: int) -> bool:
        """Whether it is certain that nothing satisfies both."""
        self._take_steps()
        if depth > _MAX_DEPTH:
            return False
        left, right = self._shape(one), self._shape(other)
        kinds = left.kinds & right.kinds
        if not kinds:
            return True
        if left.values is not None and right.values is not None:
            self._take_steps(min(len(left.values), len(right.values)) // 100)
            if left.values.isdisjoint(right.values):
                return True
        if kinds == {"object"} and any(
            self._differ_at(name, left, right, depth) for name in sorted(left.required | right.required)
        ):
            return True
        return any(
            all(self._exclude(option, whole, depth + 1) for option in options)
            for shape, whole in ((left, other), (right, one))
            for options in shape.unions()
        )

    def _differ_at(self, name: str, left: _Shape, right: _Shape, depth: int) -> bool:
        """Whether no value of this property, which is there, suits both."""
        self._take_steps((len(left.parts) + len(right.parts)) // 10)
        return any(
            self._exclude(in_one, in_other, depth + 1)
            for in_one in left.at(name)
            for in_other in right.at(name)
        )

    def _shape(self, schema: Any) -> _Shape:
        if (shape := self._shapes.get(id(schema))) is None:
            shape = _Shape()
            self._add(schema, shape, 0)
            if isinstance(schema, dict):
                self._shapes[id(schema)] = shape
        return shape

    def _add(self, schema: Any, shape: _Shape, depth: int) -> None:
        self._take_steps()
        if schema is False:
            shape.kinds = frozenset()
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        if "$ref" in schema:  # what stands beside it counts in some drafts only
            self._add(self._target(schema["$ref"]), shape, depth + 1)
            return
        shape.parts.append(schema)
        shape.kinds &= _kinds(schema)
        if (values := _values(schema)) is not None:
            shape.values = values if shape.values is None else shape.values & values
            shape.kinds &= {kind for _, kind in values}
        if isinstance(required := schema.get("required"), list):
            shape.required.update(name for name in required if isinstance(name, str))
        if isinstance(conjunction := schema.get("allOf"), list):
            for part in conjunction:
                self._add(part, shape, depth + 1)

    def _target(self, reference: Any) -> Any:
        """What it refers to; True, which says nothing, where that is not to be found here."""
        if not isinstance(reference, str) or not self._has_one_root:
            return True
        if reference != "#" and not reference.startswith("#/"):
            return True
        node = self._document
        for token in unquote(reference).split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return True
        return node


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    names = schema.get("type")
    if names is None:
        return _ALL_KINDS
    listed = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name in _KINDS_OF_TYPE for name in listed):
        return _ALL_KINDS  # no schema: the library will refuse it
    return frozenset().union(*(_KINDS_OF_TYPE[name] for name in listed))


def _values(schema: dict[str, Any]) -> frozenset[Any] | None:
    """Pairs of a value, in a form that can be compared as JSON compares, and its kind."""
    if "const" in schema:
        return frozenset([_comparable(schema["const"])])
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_comparable, values))
    return None


def _comparable(value: Any) -> tuple[Any, str]:
    if value is None:
        return (None, "null")
    if isinstance(value, bool):
        return (value, "boolean")
    if isinstance(value, str):
        return (value, "string")
    if isinstance(value, list):
        return (tuple(map(_comparable, value)), "array")
    if isinstance(value, dict):
        return (frozenset((name, _comparable(each)) for name, each in value.items()), "object")
    return (value, "integer" if value == value // 1 else _FRACTION)  # 1 and 1.0 are one number


def _property_names(shape: _Shape) -> Iterator[str]:
    for part in shape.parts:
        if isinstance(properties := part.get("properties"), dict):
            yield from properties


def _require(shape: _Shape, name: str) -> None:
    for part in shape.parts:
        properties, required = part.get("properties"), part.get("required", [])
        if isinstance(properties, dict) and name in properties and isinstance(required, list):
            part["required"] = list(dict.fromkeys([*map(str, required), name]))
