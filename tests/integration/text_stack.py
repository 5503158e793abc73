"""A stack for the endpoints that take texts without generating: a model that writes, and two that embed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.http_client import Answer, send
from tests.models import write_tiny_bert
from tests.stack import Stack, fake_model

WRITER = "org/writer"  # a route: names may hold slashes
WRITER_MAX_LEN = 128
EMBEDDER = "embedder"
EMBEDDER_MAX_LEN = 100
ALIKE = "alike"  # a route to the embedder
BERT = "bert"  # has special tokens around a text
ONCE_A_MINUTE = {"name": "rare", "requests_per_minute": 1}, {"name": "seldom", "requests_per_minute": 1}


class TextStack(Stack):
    def __init__(self, redis_url: str, directory: Path) -> None:
        """`directory`: for the model with weights."""
        self.bert_path = directory / BERT
        write_tiny_bert(self.bert_path)
        super().__init__(
            redis_url,
            {
                "models": [
                    fake_model("writer", max_model_len=WRITER_MAX_LEN),
                    fake_model(EMBEDDER, runner="pooling", max_model_len=EMBEDDER_MAX_LEN),
                    {"name": BERT, "source": str(self.bert_path), "runner": "pooling", "num_threads": 1},
                ],
                "tenants": [{"name": "all"}, *ONCE_A_MINUTE],
                "routes": [
                    {"name": WRITER, "split": [{"variant": "v", "model": "writer"}]},
                    {"name": ALIKE, "split": [{"variant": "v", "model": EMBEDDER}]},
                ],
            },
        )
        self.secret = self.key()  # of a tenant without limits

    def post(self, path: str, *, key: str | None = None, **fields: Any) -> Answer:
        return send(self.url, "POST", path, fields, key=key or self.secret)

    @property
    def num_prompt_tokens(self) -> float:
        """That engines have computed so far."""
        lines = self.get("/metrics")[1].decode().splitlines()
        counts = [line for line in lines if line.startswith("vllm:prompt_tokens_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counts)
