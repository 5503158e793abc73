"""Many requests at one instant, over one or several gateways."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec


@dataclass(frozen=True)
class BurstAnswer:
    status: int
    headers: dict[str, str]  # names in lower case
    data: bytes
    took_s: float

    @property
    def error(self) -> dict[str, Any]:
        return msgspec.json.decode(self.data)["error"]


async def burst(
    urls: Sequence[str], key: str, bodies: Sequence[dict[str, Any]], *, path: str = "/v1/completions"
) -> list[BurstAnswer]:
    """In turns to each of the URLs; the answers in the order of the bodies."""
    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def post(url: str, body: dict[str, Any]) -> BurstAnswer:
            began = time.monotonic()
            async with session.post(url + path, json=body) as response:
                data = await response.read()
                told = {name.lower(): value for name, value in response.headers.items()}
                return BurstAnswer(response.status, told, data, time.monotonic() - began)

        return await asyncio.gather(
            *(post(url, body) for url, body in zip(itertools.cycle(urls), bodies, strict=False))
        )


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "hello", "max_tokens": 1, **fields}
