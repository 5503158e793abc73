"""Official client libraries of Python. Nothing else of ours needs them, so they may be missing.

They are imported when a row asks for one, and in a thread, since that takes a second.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import NotApplicable

TIMEOUT_S = 60.0  # of one request: what runs in a thread cannot be cancelled


async def client_library(name: str, oldest: tuple[int, int]) -> ModuleType:
    """Raises NotApplicable, which says what to install, unless there is this version or a later one."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise NotApplicable(f"its client is not installed here: pip install {name}") from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
        raise NotApplicable(f"{name} {version} is too old: pip install --upgrade {name}")
    try:
        return await asyncio.to_thread(importlib.import_module, name)
    except Exception as error:  # whatever it is, it is no fault of the server's
        raise NotApplicable(f"{name} {version} cannot be imported: {error}") from error


@contextmanager
def refusals_told(library: ModuleType, path: str, feature: str | None = None) -> Iterator[None]:
    """A refusal that nobody caught is what `Answer.ok` makes of it: NotApplicable, or CheckFailed."""
    try:
        yield
    except library.APIStatusError as error:
        response = error.response
        headers = {name.lower(): value for name, value in response.headers.items()}
        Answer(path, response.status_code, headers, response.content).ok(feature)
        raise
