"""A TCP proxy between a process and its Redis, under a test's control."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

ResultT = TypeVar("ResultT")


class TcpProxy:
    """Use as a context manager. It runs in a thread of its own, so a test may block.

    `delay_s` holds what clients send back for so long; order is kept. `target` is where new connections go.
    """

    def __init__(self, redis_url: str) -> None:
        parts = urlsplit(redis_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._parts = parts
        self.target = (parts.hostname, parts.port)
        self.delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """As the given one, but through here."""
        credentials = self._parts.netloc.rpartition("@")[0]
        at = f"{credentials}@" if credentials else ""
        return self._parts._replace(netloc=f"{at}127.0.0.1:{self._port}").geturl()

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stop(self) -> None:
        """As if the server had ended: connections are cut, new ones refused."""
        self._run(self._stop)

    def resume(self) -> None:
        self._run(self._listen)

    def _run(self, make: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # nobody waits for this task's result
                upstream_reader, upstream_writer = await asyncio.open_connection(*self.target)
                self._writers.add(upstream_writer)
                try:
                    await asyncio.gather(
                        self._pump(reader, upstream_writer, is_delayed=True),
                        self._pump(upstream_reader, writer, is_delayed=False),
                    )
                finally:
                    upstream_writer.close()
                    self._writers.discard(upstream_writer)
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_delayed: bool
    ) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due_at, data = await waiting.get()
                await asyncio.sleep(max(0.0, due_at - self._loop.time()))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            while True:
                data = await reader.read(65_536)
                waiting.put_nowait((self._loop.time() + (self.delay_s if is_delayed else 0.0), data))
                if not data:
                    await sending
                    return
        finally:
            sending.cancel()
