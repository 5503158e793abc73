"""One check of one behaviour of a server, and what it can come to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType

from loadtest.conformance.server import Server

RowFunction = Callable[[Server], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    """`run` returns when the behaviour is right. Otherwise it raises CheckFailed, or NotApplicable where
    the server does not claim to have it (`check.py`)."""

    group: str
    name: str  # group.what-it-checks
    proves: str
    run: RowFunction


def row(function: RowFunction) -> Row:
    """Makes a row of a function: named after it and its module, and what it proves is its docstring."""
    group = function.__module__.rsplit(".", 1)[-1].replace("_", "-")
    assert function.__doc__ is not None, f"{function.__name__} does not say what it proves"
    name = f"{group}.{function.__name__.replace('_', '-')}"
    return Row(group, name, " ".join(function.__doc__.split()), function)


def rows_of(module: ModuleType) -> list[Row]:
    """In the order in which the module has them."""
    return [value for value in vars(module).values() if isinstance(value, Row)]
