"""One process of a fleet: takes jobs from its standard input, gives records to its standard output."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import uvloop

from loadtest.client import OpenAIClient
from loadtest.fleet import LENGTH_BYTES, Done, Job, Start
from loadtest.generator import generate_load


def main() -> None:
    """Ends when its input does: a fleet that is gone must not leave a load behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the fleet ends us
    output = os.dup(1)
    os.dup2(2, 1)  # what anybody prints must not get between the records
    uvloop.run(_work(output))


async def _work(output: int) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0)
    )
    next_frame = asyncio.create_task(_hear(reader))
    while True:
        job = msgspec.msgpack.decode(await next_frame, type=Job)
        _tell(output, None)  # ready
        start = msgspec.msgpack.decode(await _hear(reader), type=Start)
        next_frame = asyncio.create_task(_hear(reader))  # sees the fleet's end, also during the run
        async with OpenAIClient(job.target) as client:
            run = await generate_load(
                job.items, job.schedule, client.send, t_start_ns=start.t_start_ns, indices=job.indices
            )
        _tell(output, Done(run.records, run.t_end_ns, run.generator[0]))


async def _hear(reader: asyncio.StreamReader) -> bytes:
    try:
        length = await reader.readexactly(LENGTH_BYTES)
        return await reader.readexactly(int.from_bytes(length, "little"))
    except asyncio.IncompleteReadError:
        os._exit(0)  # whatever is under way, there is nobody left to tell


def _tell(output: int, message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    left = memoryview(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
    while left:
        left = left[os.write(output, left) :]


if __name__ == "__main__":
    main()
