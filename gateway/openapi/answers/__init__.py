"""The JSON of answers that are not streamed, as types, a module for each interface.
They are closed: a field that is sent and not listed here fails those tests. `NotRequired` marks what is only
there where a request asked for it, or where there is something to tell.
"""

from __future__ import annotations

from pydantic import ConfigDict

CLOSED = ConfigDict(extra="forbid")
