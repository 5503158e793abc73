"""What the supervisor prints: its own words, and every service's lines with the service's name in front."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI foregrounds, handed out by order of first appearance
NAME_WIDTH = 16


class Console:
    """Log lines go to stderr, what the user asked for goes to stdout.

    A reader that went away (`headrace up | head`, a closed terminal) must not end the stack, so
    write errors are ignored here.
    """

    def __init__(self, output: TextIO | None = None, log: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._log = log or sys.stderr
        self._coloured = self._log.isatty()
        self._colour_of: dict[str, int] = {}

    def say(self, text: str) -> None:
        self._write(self._output, text)

    def log(self, service: str, line: str) -> None:
        prefix = f"{service:<{NAME_WIDTH}} |"
        if self._coloured:
            colour = self._colour_of.setdefault(service, COLOURS[len(self._colour_of) % len(COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        self._write(self._log, f"{prefix} {line}")

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
            stream.write(text + "\n")
            stream.flush()
