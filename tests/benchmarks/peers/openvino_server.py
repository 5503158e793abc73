"""OpenVINO GenAI's continuous batching as an OpenAI-style server. Runs in the peer's own environment.

    python openvino_server.py --model FOLDER --name NAME --port PORT --threads N --kv-blocks N

Meant to show the engine at its best. All requests that are open share its steps, and a new one joins at the
next; each token is sent as soon as the step that made it is over. One thread does it all: a step holds
Python's lock from its beginning to its end, so that a second thread could send nothing meanwhile either, and
would only fight for the lock. While there is work, the loop alternates between a step and all that the
network has to be told and to tell.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]
import uvloop
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_BODY_BYTES = 2**24
# Turns of the event loop between two steps: a connection is accepted in one, its bytes are read in the next,
# then the head is parsed, then the body; with one to spare.
TURNS_BETWEEN_STEPS = 5


@dataclass
class Stream:
    """One request: what the engine knows it by, and the tokens that are still to be sent."""

    handle: Any
    tokens: "asyncio.Queue[tuple[list[int], bool]]" = field(default_factory=asyncio.Queue)  # and: the last


class Engine:
    """Owns the pipeline. `run` steps it for as long as a request is open."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._streams: dict[int, Stream] = {}
        self._ids = itertools.count()
        self._has_work = asyncio.Event()

    def submit(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Stream:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        request_id = next(self._ids)
        ids = openvino.Tensor(np.array([prompt], np.int64))
        stream = Stream(self._pipeline.add_request(request_id, ids, config))
        self._streams[request_id] = stream
        self._has_work.set()
        return stream

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._deliver()
            if not self._streams:
                self._has_work.clear()
            for _ in range(TURNS_BETWEEN_STEPS):
                await asyncio.sleep(0)

    def _deliver(self) -> None:
        for request_id, stream in list(self._streams.items()):
            is_over = stream.handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            tokens: list[int] = []
            while stream.handle.can_read():
                for output in stream.handle.read().values():
                    tokens += output.generated_ids
            if tokens or is_over:
                stream.tokens.put_nowait((tokens, is_over))
            if is_over:
                del self._streams[request_id]


class Api:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Greedy and streamed: what the benchmark asks for, and nothing else."""
        body = await request.json()
        if not body.get("stream") or body.get("temperature") != 0:
            message = "only streams, and only with temperature 0"
            return web.json_response({"error": {"message": message}}, status=400)
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt).ids
        max_tokens = body.get("max_tokens", 16)
        stream = self._engine.submit(prompt, max_tokens, body.get("ignore_eos", False))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = self._chunk_maker()
        decoder = DecodeStream(skip_special_tokens=False)
        num_tokens, is_over = 0, False
        try:
            while not is_over:
                tokens, is_over = await stream.tokens.get()
                num_tokens += len(tokens)
                text = "".join(decoder.step(self._tokenizer, token) or "" for token in tokens)
                reason = "length" if num_tokens == max_tokens else "stop"
                choice = {"index": 0, "text": text, "finish_reason": reason if is_over else None}
                await response.write(chunk([choice], None))
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": num_tokens,
                "total_tokens": len(prompt) + num_tokens,
            }
            await response.write(chunk([], usage) + b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            if not is_over:
                stream.handle.cancel()
        return response

    def _chunk_maker(self) -> Callable[[list[Any], Any], bytes]:
        head = {"id": f"cmpl-{time.monotonic_ns()}", "object": "text_completion", "model": self._name}

        def chunk(choices: list[Any], usage: Any) -> bytes:
            return b"data: %s\n\n" % json.dumps({**head, "choices": choices, "usage": usage}).encode()

        return chunk


async def serve(flags: argparse.Namespace) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.num_kv_blocks = flags.kv_blocks
    properties = {"INFERENCE_NUM_THREADS": flags.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(flags.model), scheduler, "CPU", properties)
    engine = Engine(pipeline)
    api = Api(engine, Tokenizer.from_file(str(flags.model / "tokenizer.json")), flags.name)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/health", api.health),
            web.get("/v1/models", api.models),
            web.post("/v1/completions", api.completions),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", flags.port).start()
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", default="bench")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-blocks", type=int, default=1024, help="of 32 tokens")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
