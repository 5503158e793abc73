"""Trying a grammar out in a process that may die of it.

A client's text goes into a library that can recurse deeply, loop for a long time and fill memory. In
the engine each of these would end everybody's request. Here it ends this process, and with it the
one request: the engine compiles for itself only what was compiled here before.

    engine  --- tokenizer, then one form after the other --->  trial     msgpack, over a pair of pipes
            <-- "" or what is wrong with it ---------------
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import cast

import msgspec

from engine_service.parent_process import die_with
from engine_service.refusal import Refusal
from engine_service.structured_output.grammar import refused
from engine_service.structured_output.large_stack import start_large_stack_thread
from engine_service.structured_output.llguidance_grammar import (
    LlguidanceVocabulary,
    compile_grammar,
)
from shared.sampling import StructuredOutput

TIME_LIMIT_S = 5.0  # for one form
START_LIMIT_S = 30.0  # for the interpreter and the tokenizer, on a machine that is busy
MEMORY_LIMIT_BYTES = 2 * 2**30

_READY = b"ready"


class Trial:
    """One such process: started when needed, again when it has died. One caller at a time.

    It also dies with the thread that has started it.
    """

    def __init__(self, vocabulary: LlguidanceVocabulary, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._vocabulary = vocabulary
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[bytes, bytes] | None = None

    def run(self, form: StructuredOutput) -> None:
        """Raises Refusal if the form is not one to be compiled in the engine."""
        is_fresh = self._connection is None
        connection = self._connection or self._start()
        try:
            connection.send_bytes(msgspec.msgpack.encode(form))
            problem = connection.recv_bytes().decode() if connection.poll(self._time_limit_s) else None
        except (EOFError, OSError) as error:
            self.close()
            if is_fresh:
                raise refused(f"the {form.kind} is too complex to be compiled") from error
            self.run(form)  # the process may have died before, and not of this form
            return
        if problem is None:
            self.close()
            raise refused(f"the {form.kind} takes longer than {self._time_limit_s:g} s to compile")
        if problem:
            raise refused(problem)

    def close(self) -> None:
        """Kills the process; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _start(self) -> Connection[bytes, bytes]:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = cast("Connection[bytes, bytes]", ours)
        try:
            ours.send_bytes(msgspec.msgpack.encode(self._vocabulary))
            if ours.poll(START_LIMIT_S) and ours.recv_bytes() == _READY:
                return self._connection
        except (EOFError, OSError):
            pass  # told below, in the words for all ways of not starting
        self.close()
        raise Refusal("internal_error", "the process that tries grammars out does not start")


def serve(connection: Connection[bytes, bytes]) -> None:
    """Answers until the engine is gone."""
    vocabulary = msgspec.msgpack.decode(connection.recv_bytes(), type=LlguidanceVocabulary)
    tokenizer = None
    forms = msgspec.msgpack.Decoder(StructuredOutput)
    connection.send_bytes(_READY)
    while True:
        form = forms.decode(connection.recv_bytes())
        try:
            tokenizer = tokenizer or vocabulary.tokenizer()
            compile_grammar(tokenizer, form)
        except Refusal as refusal:
            connection.send_bytes(refusal.message.encode())
        except MemoryError:
            connection.send_bytes(b"the form needs too much memory")
        else:
            connection.send_bytes(b"")


def main() -> None:
    die_with(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here, and nobody studies it
    connection: Connection[bytes, bytes] = Connection(int(sys.argv[1]))

    def run() -> None:
        with suppress(EOFError, OSError):
            serve(connection)

    start_large_stack_thread(run, "trial").join()


if __name__ == "__main__":
    main()
