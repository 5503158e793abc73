"""An embedding engine's process, over real sockets, with the fake model behind them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_service.fake_embedder import FakeEmbedder
from shared.identifiers import RequestId, TenantId
from shared.messages import Dead, Embed, Embedded, ResetPrefixCache
from tests.integration.engine_peer import Peer, engine, peer
from tests.warm_process import WarmProcess

FAKE = FakeEmbedder(8)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@contextlib.contextmanager
def embedding_engine(
    address: str, *flags: str, options: str = "", **fields: Any
) -> Iterator[subprocess.Popen[str] | WarmProcess]:
    config = Path(address.removeprefix("ipc://")).with_suffix(".toml")
    lines = [f"{name} = {value}" for name, value in fields.items()]
    config.write_text(
        "\n".join(['[[models]]\nname = "e"\nrunner = "pooling"', f'source = "fake:{options}"', *lines])
    )
    with engine(address, "--config", str(config), *flags, source=None) as process:
        yield process


def embed(gateway: Peer, name: str, texts: list[list[int]] | None = None, **fields: Any) -> Embed:
    message = Embed(RequestId(name), texts or [[1, 2, 3]], TenantId("acme"), **fields)
    gateway.send(message)
    return message


def wait_for_vectors(gateway: Peer, embed: Embed) -> Embedded:
    come = (each for each in gateway.messages if isinstance(each, Embedded))
    embedded = next((each for each in come if each.request_id == embed.request_id), None)
    if embedded is None:
        embedded = gateway.wait_for(Embedded, lambda each: each.request_id == embed.request_id)
    got = np.frombuffer(embedded.vectors, dtype="<f4").reshape(-1, embedded.dim)
    np.testing.assert_array_equal(got, np.stack([FAKE.vector(text) for text in embed.token_id_lists]))
    return embedded


def test_requests_of_two_gateways_share_a_pass_and_each_gets_its_own(address: str) -> None:
    with (
        embedding_engine(address, options="step_delay_ms=100"),
        peer(address, "a") as a,
        peer(address, "b") as b,
    ):
        card = a.hello().model
        assert (card.runner, card.embedding_dim, card.num_blocks) == ("pooling", 8, 0)
        b.hello()
        first = embed(a, "first")  # while it is computed, the others wait, and go together
        ours = [embed(a, f"a{number}", [[number], [number, 7]]) for number in range(5)]
        theirs = [embed(b, f"b{number}", [[number, 8]]) for number in range(5)]
        answers = [wait_for_vectors(a, each) for each in (first, *ours)]
        answers += [wait_for_vectors(b, each) for each in theirs]
        last = max(answers, key=lambda each: each.load.num_steps)  # either gateway may be told last
        assert last.load.num_steps <= 4
        assert last.load.prompt_tokens == 3 + 5 * 3 + 5 * 2
        assert {m.request_id for m in a.messages if isinstance(m, Embedded)}.isdisjoint(
            each.request_id for each in theirs
        )


def test_what_cannot_be_embedded_is_rejected_and_the_rest_goes_on(address: str) -> None:
    with embedding_engine(address), peer(address) as gateway:
        gateway.hello()
        gateway.submit("to be continued")
        reject = gateway.wait_for_reject("to be continued")
        assert (reject.code, reject.param) == ("invalid_request", "model")
        embed(gateway, "unknown token", [[1], [9999]])
        assert gateway.wait_for_reject("unknown token").param == "input[1]"
        embed(gateway, "too long", [[1] * 5000])
        assert gateway.wait_for_reject("too long").code == "context_length_exceeded"
        gateway.socket.send_multipart([b"\x04", b"not msgpack"])
        gateway.send(ResetPrefixCache())
        wait_for_vectors(gateway, embed(gateway, "good"))
        gateway.wait_until_idle()


def test_a_dealer_that_never_says_hello_is_told_so(address: str) -> None:
    with embedding_engine(address), peer(address) as stranger:
        embed(stranger, "r")
        assert stranger.wait_for_reject("r").code == "internal_error"


def test_a_generating_engine_makes_no_embeddings(address: str) -> None:
    with engine(address), peer(address) as gateway:
        assert gateway.hello().model.runner == "generate"
        embed(gateway, "r")
        reject = gateway.wait_for_reject("r")
        assert (reject.code, reject.param) == ("invalid_request", "model")
        gateway.submit("next")
        gateway.wait_until_finished("next")


def test_a_pass_that_fails_is_told_and_ends_the_process(address: str) -> None:
    with embedding_engine(address, options="die_at_step=2") as process, peer(address) as gateway:
        gateway.hello()
        wait_for_vectors(gateway, embed(gateway, "first"))
        embed(gateway, "second")
        assert "told to fail" in gateway.wait_for(Dead).reason
        assert process.wait(10) == 1
