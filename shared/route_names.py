"""Names of routes, as tenants and keys refer to them. A model's own name is a route to it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

ALL = "*"


def unknown_routes(field: str, names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A sentence about each name that no route has. `field`: in which they stand."""
    for name in names:
        if name == ALL or name in known:
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(known)[:20])}"
        yield f"{field}: no route or model is named {name!r}; {hint}"
