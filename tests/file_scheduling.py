"""Which tests go to the same process of pytest-xdist: those of a file, or all that share a stack.

Its own `loadgroup` cannot be used: version 3.8 tells groups through an attribute that pytest 9.2 ignores.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

REAL_STACK = "real_stack"
# Fixtures of several files whose start takes seconds, and the folders whose conftest.py takes them for all.
_SHARED = (REAL_STACK, "text_stack", "right_server", "transformers_model")
_FOLDERS = {"tests/clients": REAL_STACK}
_TESTS = Path(__file__).parent.parent


def group_of(nodeid: str) -> str:
    return _group_of_file(nodeid.partition("::")[0])


@cache
def _group_of_file(path: str) -> str:
    if (folder := str(Path(path).parent)) in _FOLDERS:
        return _FOLDERS[folder]
    source = (_TESTS / path).read_text(encoding="utf-8")
    return next((fixture for fixture in _SHARED if fixture in source), path)


class FileScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
