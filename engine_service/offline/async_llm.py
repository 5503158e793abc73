"""AsyncLLM: requests that come and go while others run, each a stream of what it has become."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncGenerator
from typing import Unpack

from engine_service.offline.engine_worker import EngineWorker
from engine_service.offline.failures import EngineFailedError, GenerationError
from engine_service.offline.model_options import ModelOptions, model_config_of
from engine_service.offline.offline_request import OfflineRequest
from engine_service.offline.prompts import Prompt, encode_prompt
from engine_service.offline.request_output import RequestOutput
from engine_service.offline.sampling_params import SamplingParams
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer


class AsyncLLM:
    """A model in this process, for coroutines. Requests that run together share the batch.

    Of one event loop. It ends with `shutdown`, or when it is no longer referenced.
    """

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        """Loads the model, as LLM does, and blocks for so long. Raises ConfigError."""
        config = model_config_of(model, options)
        if config.runner == "pooling":
            raise ConfigError("AsyncLLM generates text; LLM(...).embed() makes embeddings", "runner")
        self._worker = EngineWorker(config)
        self._close = weakref.finalize(self, self._worker.close)
        self._seeds = random.Random(config.seed)
        self._streams: dict[str, _Stream] = {}

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the output as it grows; each one holds all there is. The last has `finished`.

        A consumer that is slower than the model misses outputs, never tokens. Leaving the loop early,
        closing the iterator or cancelling the task ends the request. Raises TypeError or ValueError for
        what the model cannot run, GenerationError when the engine refuses it later, EngineFailedError.
        """
        if request_id in self._streams:
            raise ValueError(f"request_id {request_id!r} is in use")
        params = sampling_params if sampling_params is not None else SamplingParams()
        stream = self._streams[request_id] = _Stream(asyncio.get_running_loop(), self._worker)
        try:
            # Of a long text this takes a while.
            encoded = await asyncio.to_thread(encode_prompt, prompt, self._worker.tokenizer)
            request = OfflineRequest(
                request_id,
                encoded,
                params,
                self._worker.card,
                self._worker.tokenizer,
                seed=params.first_seed(self._seeds),
                on_change=stream.put,
            )
            stream.submit(request)
            while True:
                output = await stream.take()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            stream.abort()

    async def abort(self, request_id: str) -> None:
        """Ends a request, whose iterator yields what there is, with `finish_reason` "abort"."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.abort()

    def get_tokenizer(self) -> Tokenizer:
        """Our own: `encode`, `encode_chat`, `decode`."""
        return self._worker.tokenizer

    def shutdown(self) -> None:
        """Frees the model, after the step that is being computed; what runs fails. Idempotent."""
        self._close()


class _Stream:
    """The latest output of one request, from the engine's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: EngineWorker) -> None:
        self._loop = loop
        self._worker = worker
        self._changed = asyncio.Event()
        self._latest: RequestOutput | None = None
        self._failure: BaseException | None = None
        self._is_aborted = False
        self._request: OfflineRequest | None = None

    def submit(self, request: OfflineRequest) -> None:
        """Raises EngineFailedError."""
        self._worker.submit([request])
        self._request = request
        if self._is_aborted:  # while its prompt was being encoded
            self._worker.abort([request])

    def abort(self) -> None:
        """Ends what runs; idempotent. Must stay synchronous: it runs while being cancelled."""
        self._is_aborted = True
        if self._request is not None:
            self._worker.abort([self._request])

    def put(self, request: OfflineRequest) -> None:
        """In the engine's thread, which goes on to change the request: so a copy is handed over."""
        try:
            self._loop.call_soon_threadsafe(self._set, request.output(), request.failure)
        except RuntimeError:  # the loop has closed without closing its iterators
            self._worker.abort([request])

    async def take(self) -> RequestOutput:
        """The next output that differs from the last. Raises GenerationError or EngineFailedError."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise EngineFailedError(f"the engine has ended: {self._failure}") from self._failure
        assert self._latest is not None, "a change without an output"
        if self._latest.error is not None:
            raise GenerationError([self._latest])
        return self._latest

    def _set(self, output: RequestOutput, failure: BaseException | None) -> None:
        self._latest, self._failure = output, failure
        self._changed.set()
