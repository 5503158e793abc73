"""A real gateway, with models for which every row applies.

Most rows are run against a fake model, which is quick and always does as forms want. It knows nothing of
temperatures and biases, and is too quick for rows that come in between: those have a tiny real model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtest.conformance.row import Row
from loadtest.conformance.server import open_server
from loadtest.conformance.suite import Result, run_rows
from tests.clients.node import FOLDER
from tests.models import write_tiny_llama
from tests.stack import Stack, fake_model

FAKE = "org/fake"  # a route: names may hold slashes
TINY = "tiny"
VECTORS = "vectors"
NODE_MODULES = FOLDER / "node_modules"
NOT_APPLICABLE = ("chat.thoughts-are-told-apart",)  # neither model thinks
OF_THE_TINY_MODEL = (
    "sampling.",
    "streams.it-begins-before-it-ends",
    "responses.the-background-can-be-cancelled",
)


class RightServer:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.url = stack.url
        self.key = stack.key()

    async def results(
        self, url: str, rows: Sequence[Row], *, timeout_s: float, concurrency: int
    ) -> AsyncIterator[Result]:
        """Of rows against this server, which is reached at this URL, perhaps through a wrong one."""
        for model in (FAKE, TINY):
            chosen = [row for row in rows if model_for(row) == model]
            if chosen:
                async with open_server(
                    url, key=self.key, model=model, embedding_model=VECTORS, node_modules=NODE_MODULES
                ) as server:
                    async for result in run_rows(
                        server, chosen, timeout_s=timeout_s, concurrency=concurrency
                    ):
                        yield result


def model_for(row: Row) -> str:
    return TINY if row.name.startswith(OF_THE_TINY_MODEL) else FAKE


@contextmanager
def running_right_server(redis_url: str, directory: Path) -> Iterator[RightServer]:
    """`directory`: for the model."""
    write_tiny_llama(directory / TINY, max_position_embeddings=4096)
    document = {
        "gateway": {"cors_allow_origins": ["*"]},
        "models": [
            fake_model("fake"),
            {"name": TINY, "source": str(directory / TINY), "num_threads": 1},
            fake_model(VECTORS, runner="pooling"),
        ],
        "routes": [{"name": FAKE, "split": [{"variant": "only", "model": "fake"}]}],
    }
    with Stack(redis_url, document) as stack:
        yield RightServer(stack)
